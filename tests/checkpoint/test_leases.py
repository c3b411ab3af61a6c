"""What one process reads, no other process's retention removes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from strata.checkpoint import CheckpointManager, Memory
from strata.checkpoint.catalog.leases import being_read, reading
from strata.checkpoint.catalog.manifest import CheckpointId
from strata.stores import open_store

READER = """
import sys
from strata.checkpoint.catalog.leases import reading
from strata.checkpoint.catalog.manifest import CheckpointId
from strata.stores import open_store
with reading(open_store(sys.argv[1]), CheckpointId(sys.argv[2])):
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_a_checkpoint_that_another_process_reads_is_not_removed(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, keep_count=1, memory=memory) as manager:
        first = manager.save(b"first", step=1).result(30)
        command = [sys.executable, "-c", READER, str(folder), first.checkpoint_id]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"reading\n"
            manager.save(b"second", step=2).result(30)
            assert manager.load(checkpoint_id=first.checkpoint_id) == b"first"
            reader.kill()  # A lease ends with its holder, however it ends.
        manager.save(b"third", step=3).result(30)
        assert [info.step for info in manager.all_checkpoints()] == [3]
    assert sorted(path.suffix for path in folder.rglob("*") if path.is_file()) == [".bin", ".json"]


def test_a_lease_is_there_while_reading_and_not_after(folder: Path) -> None:
    store = open_store(folder)
    with (
        reading(store, CheckpointId("a")),
        reading(store, CheckpointId("a")),
        reading(store, CheckpointId("b")),
    ):
        assert being_read(store) == {"a", "b"}
    assert being_read(store) == set()


def test_a_lease_without_a_possible_holder_is_removed(folder: Path) -> None:
    store = open_store(folder)
    store.put("leases/a/nonsense", b"x")
    assert being_read(store) == set()
    assert list(store.list()) == []
