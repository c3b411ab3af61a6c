"""Run every test, one area after the other, each in a process of its own, and add up the results.

Areas use gRPC, object storage and shared memory, whose threads do not survive a fork; tests of loaders fork. In
processes of their own they cannot disturb each other. Ends with one line: N passed, N failed, N skipped.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5
APART = (Path("tests/data/tokens"),)
"""Folders inside an area that are an area of their own."""


def main() -> int:
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    broken = []
    began_s = time.monotonic()
    for area in areas():
        print(f"\n=== {area[0]}", flush=True)
        status, counts = run(area)
        if status not in (0, NO_TESTS):
            broken.append(area[0])
            if not counts["failed"]:
                print(f"{area[0]} ended with status {status} outside of a test, or before its end")
                counts["failed"] = 1
        for name, count in counts.items():
            totals[name] += count
    print(
        f"\nall areas in {time.monotonic() - began_s:.0f} s"
        + (f"; failed in {', '.join(broken)}" if broken else "")
    )
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    return 1 if broken else 0


def areas() -> list[list[str]]:
    folders = sorted(p for p in (ROOT / "tests").iterdir() if p.is_dir() and list(p.rglob("test_*.py")))
    found = [[str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").glob("test_*.py"))]]
    for folder in folders:
        inside = [apart for apart in APART if (ROOT / apart).is_relative_to(folder)]
        found.append([str(folder.relative_to(ROOT)), *(f"--ignore={apart}" for apart in inside)])
        found += [[str(apart)] for apart in inside]
    return found


def run(area: list[str]) -> tuple[int, dict[str, int]]:
    command = [sys.executable, "-m", "pytest", "-q", *area]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        if re.search(r"\d+ (passed|failed|error|errors|skipped)\b.* in [\d.]+s", line):
            last = line
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last):
        counts["failed" if word.startswith("error") else word] += int(number)
    return process.wait(), counts


if __name__ == "__main__":
    sys.exit(main())
