"""The faulty store keeps every promise while no faults are configured, and breaks exactly those that are."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from strata.stores import DeviceError, NoSpace, Store, Truncated, Unavailable
from strata.stores.faulty import Fault, FaultyStore, SimulatedCrash, scripted, seeded
from strata.stores.local import LocalStore
from tests.stores.conformance import StoreConformance
from tests.stores.suite import Place, each_file

VALUE = random.Random(2).randbytes(5000)


class TestFaultyStoreWithoutFaults(StoreConformance):
    large_bytes = 18 << 20
    kill_rounds = 2

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(url=f"file://{tmp_path}/values")

    def open(self, place: Place) -> Store:
        return FaultyStore(super().open(place))


@pytest.fixture
def inner(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "values")
    store.put("k", b"old")
    return store


def temporary_files(store: LocalStore) -> list[str]:
    return [name for name in each_file(store.root) if name.startswith(".strata/tmp/")]


WRITE, COMMIT = 0, 1  # The operations of the first put.


@pytest.mark.parametrize(
    ("at", "fault", "error"),
    [
        (WRITE, Fault.REFUSED, Unavailable),
        (WRITE, Fault.NO_SPACE, NoSpace),
        (WRITE, Fault.DEVICE_ERROR, DeviceError),
        (COMMIT, Fault.REFUSED, Unavailable),
    ],
)
@pytest.mark.parametrize("if_absent", [False, True])
def test_a_failed_write_leaves_the_old_value(
    inner: LocalStore, at: int, fault: Fault, error: type[Exception], if_absent: bool
) -> None:
    store = FaultyStore(inner, choose=scripted({at: fault}))
    key = "new" if if_absent else "k"
    with pytest.raises(error):
        store.put(key, VALUE, if_absent=if_absent)
    assert inner.read("k") == b"old"
    assert inner.stat("new") is None
    assert temporary_files(inner) == []
    assert fault.value in store.log[0]


def test_a_lost_reply_means_done_and_an_error(inner: LocalStore) -> None:
    store = FaultyStore(inner, choose=scripted({COMMIT: Fault.LOST_REPLY, 2: Fault.LOST_REPLY}))
    with pytest.raises(Unavailable, match="reply was lost"):
        store.put("k", VALUE)
    assert inner.read("k") == VALUE
    with pytest.raises(Unavailable):
        store.delete("k")
    assert inner.stat("k") is None


def test_a_short_write_is_silent_and_short(inner: LocalStore) -> None:
    store = FaultyStore(inner, seed=1, choose=scripted({WRITE: Fault.SHORT_WRITE}))
    store.put("k", VALUE)
    kept = inner.read("k")
    assert len(kept) < len(VALUE)
    assert VALUE.startswith(kept)
    with pytest.raises(Truncated):
        store.read_into("k", memoryview(bytearray(len(VALUE))))


@pytest.mark.parametrize("when", ["on the way in", "on the way out"])
def test_a_flipped_bit_is_exactly_one(inner: LocalStore, when: str) -> None:
    store = FaultyStore(
        inner, seed=4, choose=scripted({(0 if when == "on the way in" else 2): Fault.BIT_FLIP})
    )
    given = bytearray(VALUE)
    store.put("k", given)
    buffer = bytearray(len(VALUE))
    store.read_into("k", memoryview(buffer))
    assert sum((a ^ b).bit_count() for a, b in zip(VALUE, buffer, strict=True)) == 1
    assert (inner.read("k") == VALUE) == (when == "on the way out")
    assert given == VALUE, "the caller's own memory must not change"


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_MIDWAY, Fault.CRASH_AFTER])
@pytest.mark.parametrize("at", [WRITE, COMMIT])
def test_a_crash_happened_or_did_not(tmp_path: Path, fault: Fault, at: int) -> None:
    """A real one: the process kills itself at the chosen point."""
    script = (
        "import sys\n"
        "from strata.stores.faulty import Fault, FaultyStore, crash_by_signal, scripted\n"
        "from strata.stores.local import LocalStore\n"
        "choose = scripted({int(sys.argv[2]): Fault[sys.argv[3]]})\n"
        "FaultyStore(LocalStore(sys.argv[1]), choose=choose, crash=crash_by_signal).put('k', b'new' * 1000)\n"
    )
    inner = LocalStore(tmp_path / "values")
    inner.put("k", b"old")
    done = subprocess.run([sys.executable, "-c", script, str(inner.root), str(at), fault.name], timeout=60)
    if at == COMMIT and fault is Fault.CRASH_MIDWAY:
        assert done.returncode == 0  # A commit has no middle.
    else:
        assert done.returncode == -9
    happened = at == COMMIT and fault is not Fault.CRASH_BEFORE
    assert inner.read("k") == (b"new" * 1000 if happened else b"old")
    assert temporary_files(LocalStore(inner.root)) == []


def test_a_simulated_crash_cannot_be_swallowed(inner: LocalStore) -> None:
    store = FaultyStore(inner, choose=scripted({WRITE: Fault.CRASH_MIDWAY}))

    def swallow_all() -> None:
        try:
            store.put("k", VALUE)
        except Exception:
            return

    with pytest.raises(SimulatedCrash):
        swallow_all()
    assert inner.read("k") == b"old"


def test_the_same_seed_misbehaves_in_the_same_way(tmp_path: Path) -> None:
    rates = {fault: 0.1 for fault in Fault if not fault.name.startswith("CRASH")}

    def run(name: str, seed: int) -> list[str]:
        store = FaultyStore(LocalStore(tmp_path / name), seed=seed, choose=seeded(rates))
        for number in range(60):
            for step in (lambda k: store.put(k, VALUE), store.read, store.stat, store.delete):
                try:
                    step(f"k{number % 3}")
                except (Unavailable, NoSpace, DeviceError, LookupError):
                    continue
                except Exception as error:
                    if type(error).__name__ != "NotFound":
                        raise
        return store.log

    first, second, other = run("a", 7), run("b", 7), run("c", 8)
    assert first == second
    assert first != other
    assert {fault for fault in Fault if any(fault.value in line for line in first)} == set(rates)
