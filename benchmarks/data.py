"""Samples lost and repeated when the world changes mid-epoch after a crash, beside the loaders of other projects.

    python -m benchmarks.data [--json]

Each is driven as its own documentation says, with its own resume. torchdata and Hugging Face datasets are installed with the tests'
packages; the others are installed into environments of their own in the cache directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.environments import environment
from strata.bench.data import resume
from strata.bench.data.resume import TOTAL
from strata.bench.table import report

REQUIREMENTS = {
    "dlrover": ["dlrover==0.6.1"],
    "streaming": [
        "mosaicml-streaming==0.13.0",
        "numpy<2.2",
        "xxhash<4",
        "zstd==1.5.6.8",
        "Brotli",
        "python-snappy",
        "cramjam",
        "catalogue",
    ],
    "grain": ["grain==0.2.18"],
}
WITH_DEPENDENCIES = {"grain"}
NAMES = {
    "torchdata": "torchdata",
    "datasets": "Hugging Face datasets",
    "dlrover": "DLRover",
    "streaming": "MosaicML Streaming",
    "grain": "Grain",
}


def pythons_of_peers() -> dict[str, Path]:
    """What runs each of them: this environment has two of them already."""
    own = Path(sys.executable)
    return {"torchdata": own, "datasets": own} | {
        name: environment(name, needed, with_dependencies=name in WITH_DEPENDENCIES)
        for name, needed in REQUIREMENTS.items()
    }


def _peer(peer: str, python: Path, schedule: list[int]) -> dict[str, Any]:
    script = Path(__file__).with_name("resume_peers.py")
    question = json.dumps({"total": TOTAL, "schedule": schedule})
    done = subprocess.run(
        [str(python), str(script), peer, question], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:] or ["no reason given"]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _in_words(answer: dict[str, Any]) -> str:
    if "lost" in answer:
        return f"{answer['lost']} lost + {answer['repeated']} repeated"
    return "refuses" if "refused" in answer else f"does not run ({answer['failed'][0]})"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args(argv)
    pythons = pythons_of_peers()

    def compare(schedule: list[int]) -> str:
        return ", ".join(
            f"{NAMES[peer]} {_in_words(_peer(peer, python, schedule))}" for peer, python in pythons.items()
        )

    report("Resuming data", resume.run(compare=compare), as_json=arguments.json)


if __name__ == "__main__":
    main()
