"""A dataset that is registered, and a script of the reader's."""

import json
import os
import urllib.request
from pathlib import Path

import strata  # noqa: F401

Path("news.jsonl").write_text(
    "\n".join(json.dumps({"text": f"news of day {n} " * 20}) for n in range(500)) + "\n"
)
body = {"id": "news", "name": "news", "path": str(Path("news.jsonl").resolve()), "format": "jsonl"}
request = urllib.request.Request(
    f"{os.environ['STRATA_API_URL']}/api/datasets",
    data=json.dumps(body).encode(),
    headers={"Content-Type": "application/json"},
)
urllib.request.urlopen(request, timeout=60).close()
Path("train.py").write_text(
    """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
print("rate", parser.parse_args().lr)
"""
)
