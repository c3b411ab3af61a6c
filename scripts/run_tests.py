"""Run every test, area by area, each in a process of its own, and add up the results:  run_tests.py [--slow] [AREA...]

Areas use gRPC, object storage and shared memory, whose threads do not survive a fork; tests of loaders fork. In
processes of their own they cannot disturb each other. Much of a test is waiting, so one more runs at a time than there are
cores, four at most; large areas are dealt out by file, so that no lane is left with a long one at the end. What one of them
prints is shown when it has ended. Ends with what each has cost, the slowest tests, what was left out and why, what failed, once
more, and one line: N passed, N failed, N skipped. `--slow` runs the tests that are otherwise left out, instead of the others.
"""

from __future__ import annotations

import argparse
import os
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
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5
AT_A_TIME = min(len(os.sched_getaffinity(0)) + 1, 4)
APART = (Path("tests/data/tokens"),)
"""Folders inside an area that are an area of their own."""
LONGEST = {
    "tests/training": 6,
    "tests/docs": 3,
    "tests/e2e": 3,
    "tests/service": 3,
    "tests/checkpoint": 2,
    "tests/harness": 2,
    "tests/data": 2,
    "tests/launch": 2,
    "tests/dashboard": 2,
    "tests/sim": 1,
    "tests/faults": 1,
    "tests/tasks": 1,
    "tests/cli": 1,
    "tests/integrations": 1,
    "tests/rendezvous": 1,
    "tests/core": 1,
    "tests/bench": 1,
    "tests/stores": 1,
}
"""Started first, in this order, so that none of them is left for the end; and into how many parts each is dealt out."""
OUTCOMES = ("passed", "failed", "skipped")
SLOWEST_SHOWN = 20
SLOW_S = 10.0
CLOSING_LINES = 40
"""How much of what a failed area said last is said again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    area: str
    status: int
    output: str
    elapsed_s: float
    cpu_s: float
    """Of pytest and of every process that its tests have waited for."""

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

    def slowest(self) -> list[tuple[float, str]]:
        """Seconds of each test, or of its set-up, that took long."""
        found = re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(\S+)", self.output, re.M)
        return [(float(elapsed_s), test) for elapsed_s, test in found]

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

    def run(part: Part) -> Result:
        result = run_part(part, *(("-m", "slow") if arguments.slow else ()))
        with showing:
            print(
                f"\n=== {result.area}, {result.elapsed_s:.0f} s, status {result.status}\n{result.output}",
                flush=True,
            )
        return result

    with ThreadPoolExecutor(AT_A_TIME) as lanes:
        results = list(lanes.map(run, chosen))
    print(f"\n{'':32} {'elapsed':>9} {'CPU':>9}")
    for result in results:
        print(f"{result.area:32} {result.elapsed_s:7.0f} s {result.cpu_s:7.0f} s")
    slowest = sorted((test for result in results for test in result.slowest()), reverse=True)
    if slowest:
        print("\nslowest:")
    for elapsed_s, test in slowest[:SLOWEST_SHOWN]:
        print(f"  {elapsed_s:5.0f} s  {test}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one pytest runs: an area, or every so-many-th file of it."""

    name: str
    arguments: list[str]


def areas(names: Sequence[str] = ()) -> list[Part]:
    """All areas or those that are named, in parts; the longest first."""
    folders = sorted(p for p in (ROOT / "tests").iterdir() if p.is_dir() and list(p.rglob("test_*.py")))
    folders += [ROOT / apart for apart in APART]
    files = {str(folder.relative_to(ROOT)): _files_of(folder) for folder in folders}
    files["tests"] = sorted((ROOT / "tests").glob("test_*.py"))
    wanted = {name.rstrip("/") for name in names}
    if unknown := wanted - set(files):
        known = ", ".join(sorted(files))
        raise ValueError(f"there is no area {', '.join(sorted(unknown))}; there are: {known}")
    order = list(LONGEST)
    chosen = sorted(
        (area for area in files if area in wanted or not wanted),
        key=lambda area: order.index(area) if area in order else len(order),
    )
    parts = [_dealt_out(area, files[area], LONGEST.get(area, 1)) for area in chosen]
    # Of the areas in several parts first all first parts, then all second ones: areas that compute run beside some that wait.
    rounds = zip_longest(*(dealt for dealt in parts if len(dealt) > 1))
    return [
        *(part for dealt in rounds for part in dealt if part is not None),
        *(part for dealt in parts if len(dealt) == 1 for part in dealt),
    ]


def _files_of(folder: Path) -> list[Path]:
    elsewhere = [ROOT / apart for apart in APART if ROOT / apart != folder]
    found = sorted(folder.rglob("test_*.py"))
    return [path for path in found if not any(path.is_relative_to(apart) for apart in elsewhere)]


def _dealt_out(area: str, files: Sequence[Path], parts: int) -> list[Part]:
    """In turn, by size: a file's length says roughly how much there is in it."""
    by_size = sorted(files, key=lambda path: (-path.stat().st_size, path.name))
    return [
        Part(
            name=area if parts == 1 else f"{area} {number + 1}/{parts}",
            arguments=sorted(str(path.relative_to(ROOT)) for path in by_size[number::parts]),
        )
        for number in range(parts)
    ]


def run_part(part: Part, *options: str) -> Result:
    began_s = time.monotonic()
    durations = ("--durations=0", f"--durations-min={SLOW_S}")
    command = [sys.executable, "-m", "pytest", "-q", *durations, *part.arguments, *options]
    with tempfile.TemporaryFile(
        "w+", errors="replace"
    ) as output:  # No pipe: it would wait for whoever holds it.
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return Result(
            area=part.name,
            status=process.returncode,
            output=output.read(),
            elapsed_s=time.monotonic() - began_s,
            cpu_s=used.ru_utime + used.ru_stime,
        )


if __name__ == "__main__":
    sys.exit(main())
