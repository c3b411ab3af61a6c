"""A fixed budget of cases for every target, the same ones each time; and proof that the harness would notice.

More of them: `python -m tests.fuzz all --cases 100000 --seed 2`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import pytest

from tests.fuzz import harness, targets
from tests.fuzz.harness import fuzz
from tests.fuzz.names import TARGETS
from tests.support_programs import ROOT

CASES = {
    "wire": 3_000,
    "events": 800,
    "manifest": 3_000,
    "index": 1_500,
    "settings": 800,
    "trainer_config": 60,
    "image": 400,
    "import": 600,
    "journal": 300,
    "http": 250,
}


def test_every_target_has_a_budget_and_can_be_made() -> None:
    assert CASES.keys() == set(TARGETS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TARGETS)
def test_wrong_bytes_give_typed_errors_in_bounded_time_and_memory(name: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, "--cases", str(CASES[name]), "--seed", "1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Planted(targets.Stateless):
    def __init__(self, mistake: str) -> None:
        self._mistake = mistake
        self._kept: list[bytes] = []

    def make(self, chance: Random) -> bytes:
        return chance.randbytes(4)

    def run(self, data: bytes) -> None:
        if data[0] % 8:
            return
        match self._mistake:
            case "crash":
                os.abort()
            case "hang":
                while True:
                    pass
            case "error":
                raise KeyError(data)
            case "memory":
                self._kept.append(bytes(2 << 30))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [("crash", "-6"), ("hang", "Hang"), ("error", "KeyError"), ("memory", "MemoryError")],
)
def test_harness_would_notice(mistake: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "make_target", lambda name: Planted(mistake))
    monkeypatch.setattr(harness, "CASE_S", 0.2)
    result = fuzz("planted", seed=1, first=0, cases=20)
    assert result.failures
    assert said in result.failures[0].what
    assert result.failures[0].data[0] % 8 == 0, "the case is named by what was in it"


def test_a_case_is_a_function_of_its_seed_and_number() -> None:
    target = targets.make_target("manifest")
    assert target.make(Random(1 << 40 | 5)) == target.make(Random(1 << 40 | 5))
    assert target.make(Random(1 << 40 | 5)) != target.make(Random(2 << 40 | 5))
