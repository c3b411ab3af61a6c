"""Run every test, area by area, each in a process of its own, and add up the results:  run_tests.py [--slow] [AREA...]

Areas use gRPC, object storage and shared memory, whose threads do not survive a fork; tests of loaders fork. In
processes of their own they cannot disturb each other. Much of a test is waiting, so two areas run at a time; what one of
them prints is shown when it has ended. Ends with what was left out and why, what failed, once more, and one line: N passed,
N failed, N skipped. `--slow` runs the tests that are otherwise left out, instead of the others.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5
AT_A_TIME = 2
APART = (Path("tests/data/tokens"),)
"""Folders inside an area that are an area of their own."""
LONGEST = ("tests/e2e", "tests/service", "tests/data", "tests/checkpoint", "tests/tasks")
"""Started first, so that none of them is left for the end."""
OUTCOMES = ("passed", "failed", "skipped")
CLOSING_LINES = 40
"""How much of what a failed area said last is said again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    area: str
    status: int
    output: str
    elapsed_s: float

    @property
    def is_broken(self) -> bool:
        return self.status not in (0, NO_TESTS)

    def counts(self) -> dict[str, int]:
        counts = dict.fromkeys(OUTCOMES, 0)
        summaries = re.findall(
            r"^.*\d+ (?:passed|failed|errors?|skipped)\b.* in [\d.]+s.*$", self.output, re.M
        )
        for number, word in re.findall(
            r"(\d+) (passed|failed|error|skipped)", summaries[-1] if summaries else ""
        ):
            counts["failed" if word == "error" else word] += int(number)
        if self.is_broken and not counts["failed"]:
            counts["failed"] = 1  # Outside of a test, or before the end.
        return counts

    def left_out(self) -> Counter[str]:
        """How many tests were skipped, by reason."""
        found: Counter[str] = Counter()
        for number, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.*)$", self.output, re.M):
            found[reason] += int(number)
        return found

    def closing(self) -> str:
        """What failed, in pytest's own words: they come last, after everything the tests printed."""
        lines = [line for line in self.output.splitlines() if line and not line.startswith("SKIPPED")]
        return "\n".join(lines[-CLOSING_LINES:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA", help="such as tests/data; all when left out")
    parser.add_argument("--slow", action="store_true", help="the tests that are marked as slow")
    arguments = parser.parse_args()
    try:
        chosen = areas(arguments.areas)
    except ValueError as error:
        parser.error(str(error))
    began_s = time.monotonic()
    showing = threading.Lock()

    def run(area: list[str]) -> Result:
        result = run_area([*area, "-m", "slow"] if arguments.slow else area)
        with showing:
            print(
                f"\n=== {result.area}, {result.elapsed_s:.0f} s, status {result.status}\n{result.output}",
                flush=True,
            )
        return result

    with ThreadPoolExecutor(AT_A_TIME) as lanes:
        results = list(lanes.map(run, chosen))
    broken = [result for result in results if result.is_broken]
    for result in broken:
        print(f"\n=== failed in {result.area}, status {result.status}\n{result.closing()}")
    left_out = sum((result.left_out() for result in results), Counter[str]())
    if left_out:
        print("\nleft out:")
    for reason, number in left_out.most_common():
        print(f"  {number} {'test' if number == 1 else 'tests'}: {reason}")
    print(f"\nall areas in {time.monotonic() - began_s:.0f} s")
    totals = {outcome: sum(result.counts()[outcome] for result in results) for outcome in OUTCOMES}
    print(", ".join(f"{count} {outcome}" for outcome, count in totals.items()))
    return 1 if broken else 0


def areas(names: Sequence[str] = ()) -> list[list[str]]:
    """The arguments of pytest for each area: of all of them, or of those that are named."""
    folders = sorted(p for p in (ROOT / "tests").iterdir() if p.is_dir() and list(p.rglob("test_*.py")))
    found = [[str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").glob("test_*.py"))]]
    for folder in folders:
        inside = [apart for apart in APART if (ROOT / apart).is_relative_to(folder)]
        found.append([str(folder.relative_to(ROOT)), *(f"--ignore={apart}" for apart in inside)])
        found += [[str(apart)] for apart in inside]
    if unknown := {name.rstrip("/") for name in names} - {area[0] for area in found}:
        known = ", ".join(sorted(area[0] for area in found))
        raise ValueError(f"there is no area {', '.join(sorted(unknown))}; there are: {known}")
    chosen = [area for area in found if not names or area[0] in {name.rstrip("/") for name in names}]
    return sorted(chosen, key=lambda area: LONGEST.index(area[0]) if area[0] in LONGEST else len(LONGEST))


def run_area(area: list[str]) -> Result:
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", *area]
    with tempfile.TemporaryFile(
        "w+", errors="replace"
    ) as output:  # No pipe: it would wait for whoever holds it.
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
        output.seek(0)
        return Result(area=area[0], status=status, output=output.read(), elapsed_s=time.monotonic() - began_s)


if __name__ == "__main__":
    sys.exit(main())
