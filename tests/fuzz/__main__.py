"""`python -m tests.fuzz TARGET... --cases N --seed S`; exit status 1 where a case fails. `all`: every target."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.harness import fuzz
from tests.fuzz.names import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all"], nargs="+")
    parser.add_argument("--cases", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--save", type=Path, help="folder for inputs that fail")
    asked = parser.parse_args()
    if asked.save is not None:
        asked.save.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in TARGETS if "all" in asked.target else asked.target:
        result = fuzz(name, seed=asked.seed, first=asked.first, cases=asked.cases, save=asked.save)
        print(result, flush=True)
        failed = failed or bool(result.failures)
    return int(failed)


sys.exit(main())
