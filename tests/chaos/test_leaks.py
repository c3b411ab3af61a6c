"""What grows is found, in numbers that are planted and in a real process that leaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.chaos.leaks import FEWEST, MB, Kind, Sample, Watch, judge, size_bytes


def series(*values: float, kind: Kind = "memory", life: int = 1) -> list[Sample]:
    return [
        Sample(what="it", life=life, kind=kind, at_s=float(number), value=value)
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("memory", 4.0 * MB),
        ("descriptors", 1),
        ("threads", 1),
        ("shared memory", 2.0 * MB),
        ("disk", 40.0 * MB),
    ],
)
def test_steady_growth_is_a_leak(kind: Kind, step: float) -> None:
    grown = judge(series(*(step + number * step for number in range(60)), kind=kind))
    assert [each.is_leak for each in grown] == [True]
    steady = judge(series(*(100 * step + number % 3 for number in range(60)), kind=kind))
    assert [each.is_leak for each in steady] == [False]


def test_what_fills_up_at_first_is_no_leak() -> None:
    warm = [min(number, 15) * 20.0 * MB for number in range(80)]
    assert not judge(series(*warm))[0].is_leak


def test_the_longest_life_of_a_role_counts_and_a_short_one_says_nothing() -> None:
    short = series(*([1e12] * 5), life=1)
    long = series(*([5.0 * MB] * 40), life=2)
    (found,) = judge([*short, *long])
    assert (found.early, found.late, found.is_leak) == (5.0 * MB, 5.0 * MB, False)
    assert judge(series(*range(FEWEST - 1))) == []


LEAKS = """
import os, sys
kept = []
print("started", flush=True)
for line in sys.stdin:
    kept.append(bytes(5_000_000) + os.urandom(10))
    kept[-1] = bytearray(kept[-1])
    kept.append(open("/dev/null"))
    print("leaked", flush=True)
"""


def test_a_process_that_leaks_is_seen(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEAKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        watch = Watch(
            processes=lambda: {"leaky": process.pid},
            folders=lambda: {"folder": ("disk", [tmp_path])},
            every_s=3600,
        )
        for number in range(60):
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
            (tmp_path / str(number)).write_bytes(b"x" * 4096)
            watch.look()
        watch.close()
        leaks = {each.kind: each.is_leak for each in judge(watch.samples)}
        assert leaks == {"memory": True, "descriptors": True, "threads": False, "disk": False}
        assert size_bytes(tmp_path) >= 60 * 4096
    finally:
        process.kill()
        process.communicate()
