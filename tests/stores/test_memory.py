"""The memory store keeps every promise of a store, and gives memory back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from strata.processes import Process
from strata.shared_memory import forget_jobs, images_folder, job_folder, remove_dead_jobs
from strata.stores import AccessDenied, NoSpace, open_store
from strata.stores.memory import MemoryStore
from tests.stores import actor
from tests.stores.conformance import StoreConformance
from tests.stores.suite import Place, each_file

MIB = 1 << 20


class TestMemoryStore(StoreConformance):
    large_bytes = 18 << 20
    shows_half_writes = True

    @pytest.fixture
    def place(self, job_name: str) -> Iterator[Place]:
        yield Place(url=f"memory://{job_name}")
        MemoryStore(job_name).release()

    def unfinished(self, place: Place) -> list[str]:
        return temporary_files(job_folder(place.url.removeprefix("memory://")) / ".values/values")


def temporary_files(root: Path) -> list[str]:
    return [name for name in each_file(root) if name.startswith(".strata/tmp/")]


def jobs_in(shm: Path) -> list[str]:
    return sorted(path.name for path in images_folder(shm).iterdir())


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """A shared memory of its own, so that other jobs of this machine are left alone."""
    return tmp_path


# --- where it is ---


def test_the_root_is_that_of_all_memory(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(shm))
    open_store("memory://job").put("k", b"x")
    assert jobs_in(shm) == ["job"]
    assert MemoryStore("job", shm=shm).read("k") == b"x"


def test_a_job_that_has_ended_leaves_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(shm))
    for job in ("job", "another"):
        MemoryStore(job).put("k", b"x")
    forget_jobs("job")
    assert list(MemoryStore("job").list()) == []
    assert MemoryStore("another").read("k") == b"x"
    forget_jobs("job", "another", "no name of a store: ../job")
    assert list(shm.iterdir()) == []


# --- the limit ---


def test_a_limit_counts_every_value_and_keeps_what_there_was(shm: Path) -> None:
    store = MemoryStore("job", limit_bytes=10 * MIB, shm=shm)
    store.put("a", bytes(4 * MIB))
    store.put("b", bytes(4 * MIB))
    assert store.free_bytes() == 2 * MIB
    with pytest.raises(NoSpace, match=r"^\[MEMORY\]") as caught:
        store.put("c", bytes(3 * MIB))
    assert (caught.value.required_bytes, caught.value.available_bytes) == (3 * MIB, 2 * MIB)
    assert [blob.key for blob in store.list()] == ["a", "b"]
    assert temporary_files(store.root) == []
    store.delete("a")
    store.put("c", bytes(3 * MIB))
    store.put("d", bytes(3 * MIB))
    assert store.free_bytes() == 0
    with pytest.raises(NoSpace):
        store.put("e", b"x")


def test_a_stream_of_unknown_size_stops_at_the_limit(shm: Path) -> None:
    store = MemoryStore("job", limit_bytes=3 * MIB, shm=shm)
    store.put("k", b"old")

    def stream() -> None:
        with store.open_write("k") as writer:
            for _ in range(4):
                writer.write(bytes(MIB))
            writer.commit()

    with pytest.raises(NoSpace):
        stream()
    assert store.read("k") == b"old"
    assert store.free_bytes() == 3 * MIB - 3
    assert temporary_files(store.root) == []


def test_unfinished_writes_count_for_all_processes(shm: Path) -> None:
    """Two that fit alone do not both fit: the second is refused at once, not when memory runs out."""
    one = MemoryStore("job", limit_bytes=10 * MIB, shm=shm)
    two = MemoryStore("job", limit_bytes=10 * MIB, shm=shm)
    with one.open_write("a", size_hint_bytes=6 * MIB) as writer:
        with pytest.raises(NoSpace):
            two.put("b", bytes(5 * MIB))
        writer.write(b"smaller than it said")
        writer.commit()
    two.put("b", bytes(5 * MIB))
    assert one.read("a") == b"smaller than it said"


def test_racing_writers_fill_the_limit_and_never_exceed_it(shm: Path) -> None:
    limit_bytes, size_bytes, fit = 4 * MIB, MIB - 1, 4
    stores = [MemoryStore("job", limit_bytes=limit_bytes, shm=shm) for _ in range(2 * fit)]
    for _ in range(25):
        gate = threading.Barrier(len(stores))

        def attempt(store: MemoryStore, gate: threading.Barrier = gate) -> bool:
            gate.wait(30)
            try:
                store.put(f"value-{id(store)}", bytes(size_bytes))
            except NoSpace:
                return False
            return True

        with ThreadPoolExecutor(len(stores)) as pool:
            kept = sum(pool.map(attempt, stores))
        assert kept == fit
        for blob in stores[0].list():
            stores[0].delete(blob.key)


@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_a_limit_is_positive(shm: Path, limit_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        MemoryStore("job", limit_bytes=limit_bytes, shm=shm)


# --- life and death ---


def open_elsewhere(shm: Path, job: str, **options: object) -> subprocess.Popen[str]:
    """A process that opens the job, puts a value, says so, and waits to be killed or for its input to end."""
    script = (
        "import json, sys\n"
        "from strata.stores.memory import MemoryStore\n"
        "shm, job, options = json.loads(sys.argv[1])\n"
        "store = MemoryStore(job, shm=shm, **options)\n"
        "store.put('k', b'kept')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, json.dumps([str(shm), job, options])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


def test_a_killed_jobs_memory_is_found_again_and_is_no_orphan_then(shm: Path) -> None:
    end(open_elsewhere(shm, "job"))
    store = MemoryStore("job", shm=shm)
    assert store.read("k") == b"kept"
    assert remove_dead_jobs(root=shm, grace_s=0) == []
    assert store.read("k") == b"kept"


def test_memory_without_a_living_owner_is_reclaimed(shm: Path) -> None:
    running, dead = open_elsewhere(shm, "running"), open_elsewhere(shm, "dead")
    try:
        end(dead)
        assert remove_dead_jobs(root=shm) == [], "its job may come back at any moment"
        assert remove_dead_jobs(root=shm, grace_s=0) == ["dead"]
        assert MemoryStore("running", shm=shm).read("k") == b"kept"
        assert list(MemoryStore("dead", shm=shm).list()) == []
    finally:
        end(running)


def test_a_zombie_is_dead(shm: Path) -> None:
    process = open_elsewhere(shm, "job")
    process.kill()
    os.waitid(
        os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
    )  # It has ended, and nobody has taken note of it.
    try:
        assert remove_dead_jobs(root=shm, grace_s=0) == ["job"]
    finally:
        end(process)


def test_the_job_lives_as_long_as_the_owner_it_names(shm: Path, program: Callable[[str], str]) -> None:
    """A launcher that outlives its workers owns their memory."""
    launcher = subprocess.Popen([program("sleep"), "600"])
    try:
        end(open_elsewhere(shm, "job", owner_pid=launcher.pid))
        assert remove_dead_jobs(root=shm, grace_s=0) == []
    finally:
        launcher.kill()
        launcher.wait(60)
    assert remove_dead_jobs(root=shm, grace_s=0) == ["job"]


def test_workers_of_torchrun_belong_to_their_agent(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    end(open_elsewhere(shm, "job"))  # Its parent is this process, which lives.
    assert remove_dead_jobs(root=shm, grace_s=0) == []


def test_another_process_with_the_same_number_is_not_the_owner(shm: Path) -> None:
    store = MemoryStore("job", shm=shm)
    (owner,) = store.root.with_name("owners").iterdir()
    earlier = replace(Process.parse(owner.name), started_ticks=1)
    owner.rename(owner.with_name(earlier.token))
    assert remove_dead_jobs(root=shm, grace_s=0) == ["job"]


def test_an_owner_in_another_container_counts_as_alive(shm: Path) -> None:
    store = MemoryStore("job", shm=shm)
    (owner,) = store.root.with_name("owners").iterdir()
    elsewhere = replace(Process.parse(owner.name), machine="000000")
    owner.rename(owner.with_name(elsewhere.token))
    assert remove_dead_jobs(root=shm, grace_s=0) == []


def test_opening_one_job_reclaims_others_but_never_itself(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in ("mine", "theirs"):
        end(open_elsewhere(shm, job))
    long_ago_s = 1_000_000.0
    for folder, _, names in os.walk(shm):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.utime(path, (long_ago_s, long_ago_s))
    store = MemoryStore("mine", shm=shm)
    assert store.read("k") == b"kept"
    assert jobs_in(shm) == ["mine"]


def test_release_gives_everything_back(shm: Path) -> None:
    store = MemoryStore("job", shm=shm)
    store.put("folder/k", b"x")
    other = MemoryStore("other", shm=shm)
    store.release()
    store.release()
    assert jobs_in(shm) == ["other"]
    other.release()
    assert list(shm.iterdir()) == []
    again = MemoryStore("job", shm=shm)
    assert list(again.list()) == []


def test_a_removal_that_was_interrupted_is_finished_by_the_next(shm: Path) -> None:
    store = MemoryStore("job", shm=shm)
    store.put("k", b"x")
    store.root.parent.rename(store.root.parent.with_name(".values-of-a-dead-process"))
    again = MemoryStore("job", shm=shm)
    assert list(again.list()) == []
    again.release()
    assert list(shm.iterdir()) == []


def test_opening_and_releasing_at_the_same_time_is_harmless(shm: Path) -> None:
    """The directory of all jobs comes and goes with the last of them."""
    failures = []

    def come_and_go(job: str) -> None:
        try:
            for number in range(40):
                store = MemoryStore(job, shm=shm)
                store.put("k", actor.value_of(number, 50))
                assert store.read("k") == actor.value_of(number, 50)
                store.release()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(f"job-{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(shm.iterdir()) == []


# --- who may look ---


def test_values_are_private(shm: Path) -> None:
    store = MemoryStore("job", shm=shm)
    store.put("folder/k", b"x")
    for folder, _, names in os.walk(images_folder(shm)):
        assert os.stat(folder).st_mode & 0o077 == 0
        for name in names:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0


def test_a_link_in_place_of_the_folder_is_refused(
    shm: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(shm / "nowhere"))  # With a home, another name is used.
    trap = tmp_path_factory.mktemp("trap")
    images_folder(shm).symlink_to(trap)
    with pytest.raises(AccessDenied, match="belongs to"):
        MemoryStore("job", shm=shm)
    assert list(trap.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(shm: Path) -> None:
    folder = job_folder("job", root=shm)
    folder.mkdir(parents=True)
    os.chown(folder, 12345, -1)
    with pytest.raises(AccessDenied, match="belongs to uid 12345"):
        MemoryStore("job", shm=shm)


@pytest.mark.parametrize("job", ["", ".", "..", ".hidden", "a/b", "a b", "a\0", "x" * 129, "é"])
def test_a_job_name_is_one_plain_word(shm: Path, job: str) -> None:
    with pytest.raises(ValueError, match="job name"):
        MemoryStore(job, shm=shm)
    assert list(shm.iterdir()) == []
