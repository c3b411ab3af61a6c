"""Data of the reader's, and a script."""

import json
from pathlib import Path

import strata  # noqa: F401

Path("news.jsonl").write_text(
    "\n".join(json.dumps({"text": f"news of day {n} " * 20}) for n in range(500)) + "\n"
)
Path("train.py").write_text(
    """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
print("rate", parser.parse_args().lr)
"""
)
