"""Errors and full pipelines: by policy, never silent, and older checkpoints stay loadable."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint import (
    CheckpointInfo,
    CheckpointManager,
    Memory,
    Policy,
    SaveFailed,
    SaveSkipped,
    Started,
)
from strata.checkpoint.catalog.manifest import BYTES, Manifest
from strata.checkpoint.catalog.naming import Stem, new_id, step_stem, unique_stem
from strata.checkpoint.catalog.publish import publish
from strata.checkpoint.errors import Superseded
from strata.checkpoint.pipeline import BytesPayload
from strata.stores import BlobWriter, NoSpace, Store, open_store
from strata.stores.faulty import Fault, FaultyStore, Operation
from strata.stores.protocol import Buffer
from tests.checkpoint.states import assert_is_step, small_state
from tests.stores.mounts import small_tmpfs
from tests.support import eventually


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_started(self, save: Started) -> None:
        self.events.append(("started", save.step, save.tiers))

    def on_tier(self, save: Started, *, tier: str, size_bytes: int, seconds: float) -> None:
        assert size_bytes > 0
        assert seconds > 0
        self.events.append(("tier", save.step, tier))

    def on_skipped(self, save: Started, *, tier: str, reason: str) -> None:
        self.events.append(("skipped", save.step, tier, reason))

    def on_completed(self, save: Started, info: CheckpointInfo, *, seconds: float) -> None:
        self.events.append(("completed", save.step, info.tiers))

    def on_failed(self, save: Started, error: BaseException, *, seconds: float) -> None:
        self.events.append(("failed", save.step, str(error)))

    def on_removed(self, checkpoint_id: str, *, step: int, epoch: int, path: str, reason: str) -> None: ...


class SlowStore:
    """A store that waits for permission before it makes a payload visible."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.may_write = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open_write(self, key: str, **options: Any) -> BlobWriter:
        assert self.may_write.wait(60)
        return self._inner.open_write(key, **options)


def failing(
    inner: Store, fault: Fault, *, times: int = 10**6, after: int = 0, operation: str = "write"
) -> FaultyStore:
    """Payload operations fail `times` times, after letting `after` of them pass."""
    counted = iter(range(10**9))

    def choose(found: Operation, chance: object) -> Fault | None:
        if found.name != operation or not found.key.endswith((".pt", ".bin")):
            return None
        return fault if after <= next(counted) < after + times else None

    return FaultyStore(inner, choose=choose)


def test_an_observer_is_notified_of_every_stage(folder: Path, memory: Memory) -> None:
    seen = Recorder()
    with CheckpointManager(folder, memory=memory, observer=seen) as manager:
        manager.save(small_state(1), step=1).result(30)
    assert seen.events[0] == ("started", 1, ("NVME",))
    assert {event[2] for event in seen.events if event[0] == "tier"} == {"MEMORY", "NVME"}
    assert seen.events[-1][:2] == ("completed", 1)


def test_an_observer_that_fails_does_no_harm(
    folder: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorder):
        def on_tier(self, save: Started, *, tier: str, size_bytes: int, seconds: float) -> None:
            raise RuntimeError("no network")

    with CheckpointManager(folder, memory=memory, observer=Broken()) as manager:
        assert manager.save(small_state(1), step=1).result(30).step == 1
    assert "no network" in caplog.text


def test_with_fail_the_next_call_raises_what_happened(folder: Path, memory: Memory) -> None:
    seen = Recorder()
    store = failing(open_store(folder), Fault.DEVICE_ERROR, times=1)
    with CheckpointManager(store, memory=memory, policy=Policy(on_error="fail"), observer=seen) as manager:
        handle = manager.save(small_state(1), step=1)
        with pytest.raises(
            SaveFailed, match=r"\[NVME\] Failed to save checkpoint to '.*': Input/output error"
        ) as caught:
            handle.result(30)
        assert (caught.value.tier, caught.value.step) == ("NVME", 1)
        with pytest.raises(SaveFailed):
            manager.save(small_state(2), step=2)
        assert_is_step(manager.load(manager.save(small_state(3), step=3).result(30).step), 3)
    assert ("failed", 1, str(caught.value)) in seen.events


def test_with_warn_training_continues_and_the_log_says_why(
    folder: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    store = failing(open_store(folder), Fault.DEVICE_ERROR, times=2, after=1)
    with (
        CheckpointManager(store, memory=memory, policy=Policy(on_error="warn")) as manager,
        caplog.at_level(logging.WARNING),
    ):
        for step in range(1, 5):
            manager.save(small_state(step), step=step)
        assert manager.wait_pending(30)
        durable = [info.step for info in manager.all_checkpoints() if "NVME" in info.tiers]
    assert durable == [4, 1]
    assert caplog.text.count("Failed to save checkpoint") == 2


def test_with_retry_a_passing_fault_is_overcome(
    folder: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    store = failing(open_store(folder), Fault.REFUSED, times=2)
    policy = Policy(on_error="retry", retries=2, retry_delay_s=0.01)
    with CheckpointManager(store, memory=memory, policy=policy) as manager, caplog.at_level(logging.WARNING):
        assert manager.save(small_state(1), step=1).result(30).tiers == ("MEMORY", "NVME")
    assert caplog.text.count("Retrying in") == 2


def test_with_retry_a_persistent_fault_is_raised_in_the_end(folder: Path, memory: Memory) -> None:
    store = failing(open_store(folder), Fault.REFUSED)
    policy = Policy(on_error="retry", retries=2, retry_delay_s=0.01)
    with CheckpointManager(store, memory=memory, policy=policy) as manager:
        handle = manager.save(small_state(1), step=1)
        with pytest.raises(SaveFailed):
            handle.result(30)
        with pytest.raises(SaveFailed):
            manager.wait_pending()


@pytest.mark.parametrize("suffix", [".pt", ".manifest.json"])
def test_a_lost_reply_is_not_a_lost_checkpoint(folder: Path, memory: Memory, suffix: str) -> None:
    lost = iter([True])

    def choose(found: Operation, chance: object) -> Fault | None:
        if found.name == "commit" and found.key.endswith(suffix) and next(lost, False):
            return Fault.LOST_REPLY
        return None

    policy = Policy(on_error="retry", retries=1, retry_delay_s=0.0)
    with CheckpointManager(
        FaultyStore(open_store(folder), choose=choose), memory=memory, policy=policy
    ) as manager:
        manager.save(small_state(1), step=1).result(30)
        assert [info.step for info in manager.all_checkpoints()] == [1]
        assert_is_step(manager.load(), 1)
    assert len(list(folder.glob("*.pt"))) == len(list(folder.glob("*.manifest.json"))) == 1


@pytest.mark.parametrize("stem", [unique_stem, step_stem])
def test_who_is_superseded_after_the_manifest_does_not_succeed_at_the_next_attempt(
    folder: Path, stem: Stem
) -> None:
    store, asked = open_store(folder), []

    def admit(_: Store) -> None:
        asked.append(len(list(folder.glob("*.manifest.json"))))
        if asked[-1]:
            raise Superseded(where="here", generation=1, newest=2)

    draft = Manifest(checkpoint_id=new_id(1), step=1, epoch=0, created_at=time.time(), format=BYTES, parts=())
    payload = BytesPayload(b"bytes", lambda: None)
    name = stem(1, draft.checkpoint_id)
    for attempt in range(3):
        with pytest.raises(Superseded):
            publish(store, draft, payload, payload.digest, name=name, again=attempt > 0, admit=admit)
    assert asked == [0, 1, 1, 1]
    assert len(list(folder.glob("*.bin"))) == len(list(folder.glob("*.manifest.json"))) == 1
    assert not list(folder.glob("*.claim"))


def test_a_store_that_lies_about_its_writes_is_found_out_on_load(
    tmp_path: Path, memory: Memory, job: str
) -> None:
    near = failing(open_store(tmp_path / "near"), Fault.SHORT_WRITE, times=1)
    with CheckpointManager([near, tmp_path / "far"], memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
    with CheckpointManager([tmp_path / "near", tmp_path / "far"], memory=memory) as manager:
        restored = manager.restore()
    assert_is_step(restored.state, 1)
    assert "its manifest says" in restored.reasons[0]


def test_one_tier_may_fail_and_the_other_has_it(tmp_path: Path, memory: Memory) -> None:
    near = failing(open_store(tmp_path / "near"), Fault.DEVICE_ERROR)
    with CheckpointManager(
        [near, tmp_path / "far"], memory=memory, policy=Policy(on_error="warn")
    ) as manager:
        info = manager.save(small_state(1), step=1).result(30)
    assert info.path.startswith(str(tmp_path / "far"))
    assert len(info.failures) == 1
    assert "Input/output error" in info.failures[0]


@pytest.fixture
def slow(folder: Path) -> Iterator[SlowStore]:
    store = SlowStore(open_store(folder))
    yield store
    store.may_write.set()


def test_a_full_pipeline_skips_with_a_reason_when_configured_to(
    slow: SlowStore, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(slow, memory=memory, policy=Policy(when_full="skip")) as manager:
        for step in (1, 2):
            manager.save(small_state(step), step=step, must_arrive=True)
        with pytest.raises(SaveSkipped, match="still being written"):
            manager.save(small_state(3), step=3).result(0)
        slow.may_write.set()
        assert manager.wait_pending(30)
        assert [info.step for info in manager.all_checkpoints() if "NVME" in info.tiers] == [2, 1]
    assert "skipped" in caplog.text


def test_a_full_pipeline_makes_the_next_save_wait_otherwise(slow: SlowStore, memory: Memory) -> None:
    with CheckpointManager(slow, memory=memory) as manager:
        for step in (1, 2):
            manager.save(small_state(step), step=step)
        third = threading.Thread(target=manager.save, args=(small_state(3),), kwargs={"step": 3})
        third.start()
        third.join(0.1)
        assert third.is_alive()
        slow.may_write.set()
        third.join(30)
        assert not third.is_alive()
        assert manager.wait_pending(30)
        assert [info.step for info in manager.all_checkpoints()] == [3, 2, 1]


def test_a_save_to_memory_alone_touches_no_store(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        assert manager.save(small_state(2), step=2, tiers=["MEMORY"]).result(30).tiers == ("MEMORY",)
        manager.save(small_state(3), step=3).result(30)
        assert [info.step for info in manager.all_checkpoints()] == [3, 2, 1]
    with CheckpointManager(folder, memory=memory) as manager:
        assert [info.step for info in manager.all_checkpoints()] == [3, 1]


def test_the_last_save_of_a_script_is_not_lost(folder: Path, memory: Memory, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom strata.checkpoint import CheckpointManager, Memory\n"
        "from tests.checkpoint.states import small_state\n"
        f"manager = CheckpointManager({str(folder)!r}, memory=Memory(job={memory.job!r}))\n"
        "manager.save(small_state(5), step=5)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=150)
    with CheckpointManager(folder, memory=memory) as manager:
        assert_is_step(manager.load(), 5)


def test_lack_of_space_is_noticed_before_a_save_starts(tmp_path: Path, memory: Memory) -> None:
    with (
        small_tmpfs(tmp_path / "small", size_bytes=4 << 20) as at,
        CheckpointManager(at, memory=memory, policy=Policy(on_error="warn")) as manager,
    ):
        manager.save(small_state(1), step=1).result(30)
        handle = manager.save(small_state(2, elements=1_000_000), step=2)
        with pytest.raises(
            SaveFailed, match=r"\[NVME\] Failed to save checkpoint to '.*': No space left on device"
        ) as caught:
            handle.result(0)
        assert isinstance(caught.value.__cause__, NoSpace)
        assert len(list(at.glob("*.pt"))) == 1
        manager.save(small_state(3), step=3).result(30)
        assert_is_step(manager.load(step=1), 1)


class BlindStore:
    """A store that does not know how much space it has."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def free_bytes(self) -> int:
        return 1 << 40

    def open_write(self, key: str, **options: Any) -> BlobWriter:
        options.pop("size_hint_bytes", None)
        return self._inner.open_write(key, **options)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        with self.open_write(key, if_absent=if_absent) as writer:
            writer.write(data)
            writer.commit()


@pytest.mark.parametrize("free_bytes", [64 << 10, 300 << 10, 700 << 10])
def test_a_disk_that_fills_up_half_way_costs_one_save_and_nothing_else(
    tmp_path: Path, memory: Memory, free_bytes: int
) -> None:
    """Space for one checkpoint and some bytes: the second one hits the end of the device while it is written."""
    first = small_state(1)
    with small_tmpfs(
        tmp_path / "small", size_bytes=400 << 10 if free_bytes < 100 << 10 else (400 << 10) + free_bytes
    ) as at:
        with CheckpointManager(
            BlindStore(open_store(at)), memory=memory, policy=Policy(on_error="warn")
        ) as manager:
            manager.save(first, step=1).result(30)
            handle = manager.save(small_state(2, elements=300_000), step=2)
            with pytest.raises(SaveFailed, match="No space left on device"):
                handle.result(30)
            assert_is_step(manager.load(step=1), 1)
            manager.save(b"small", step=3).result(30)
        left = sorted(path.name for path in at.rglob("*") if path.is_file())
        assert len(left) == 4, left  # Two payloads, two manifests, nothing temporary.
        with CheckpointManager(at, memory=memory) as manager:
            assert manager.load() == b"small"
            assert_is_step(manager.load(step=1), 1)


def test_a_tier_whose_history_cannot_be_read_does_not_make_new_checkpoints_look_old(
    tmp_path: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager(far, memory=memory) as manager:
        for step in range(1, 5):
            manager.save(small_state(step), step=step).result(30)

    def choose(found: Operation, chance: object) -> Fault | None:
        return Fault.REFUSED if found.name == "list" else None

    blind = FaultyStore(open_store(far), choose=choose)
    with CheckpointManager([near, blind], memory=memory, policy=Policy(on_error="warn")) as manager:
        manager.save(small_state(9), step=9).result(30)
    assert "continuing without the lineage" in caplog.text
    with CheckpointManager([near, far], memory=memory) as manager:
        assert_is_step(manager.load(), 9)


def test_policies_are_checked() -> None:
    with pytest.raises(ValueError, match="on_error"):
        Policy(on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="when_full"):
        Policy(when_full="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="retries"):
        Policy(retries=-1)
    with pytest.raises(ValueError, match="retry_delay_s"):
        Policy(retry_delay_s=-1.0)


def test_a_slow_far_tier_keeps_no_image_from_the_next_save(tmp_path: Path, memory: Memory) -> None:
    far = SlowStore(open_store(tmp_path / "far"))
    near = CheckpointManager(
        [open_store(tmp_path / "near"), far],
        memory=memory,
        policy=Policy(when_full="skip"),
    )
    with near as manager:
        arrived = []
        for step in range(1, 6):
            handle = manager.save(small_state(step), step)
            path = tmp_path / "near"
            deadline = threading.Event()
            while not any(
                f"-{step:08d}-" in p.name or f"{step:08d}" in p.name for p in path.glob("*.manifest.json")
            ):
                assert not handle.done(), handle.exception()
                deadline.wait(0.01)
            arrived.append(step)
        assert arrived == [1, 2, 3, 4, 5]
        far.may_write.set()
        assert manager.wait_pending(60)
    with CheckpointManager(tmp_path / "far", memory=memory) as manager:
        assert_is_step(manager.load(), 5)


# A slow store: bounded backlog, bounded close.


class Gate:
    """A store whose uploads wait to be let through, one by one; `began` tells which has."""

    def __init__(self, inner: Store, tier: str = "FAR") -> None:
        self._inner = inner
        self.tier = tier
        self.began: queue.Queue[str] = queue.Queue()
        self.removed: queue.Queue[str] = queue.Queue()
        self._may_pass = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open_write(self, key: str, **options: Any) -> BlobWriter:
        if key.endswith((".pt", ".bin")):
            self.began.put(key)
            assert self._may_pass.acquire(timeout=60)
        return self._inner.open_write(key, **options)

    def delete(self, key: str) -> None:
        self._inner.delete(key)
        self.removed.put(key)

    def let(self, uploads: int) -> None:
        self._may_pass.release(uploads)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(open_store(tmp_path / "far"))
    yield gate
    gate.let(1000)


def steps_in(folder: Path) -> list[int]:
    with CheckpointManager(folder, memory=Memory(job=f"look-{uuid.uuid4().hex[:8]}")) as manager:
        return sorted(info.step for info in manager.all_checkpoints())


class Arrivals(Recorder):
    """Also wakes who waits for a save to be in a tier."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: queue.Queue[tuple[int, str]] = queue.Queue()

    def on_tier(self, save: Started, *, tier: str, size_bytes: int, seconds: float) -> None:
        super().on_tier(save, tier=tier, size_bytes=size_bytes, seconds=seconds)
        self.arrived.put((save.step, tier))

    def until(self, step: int, tier: str) -> None:
        while self.arrived.get(timeout=60) != (step, tier):
            pass


@pytest.mark.parametrize("on_error", ["warn", "fail", "retry"])
@pytest.mark.parametrize("when_full", ["wait", "skip"])
def test_a_slow_far_tier_gets_the_newest_and_skips_the_rest_with_a_reason(
    tmp_path: Path,
    far: Gate,
    memory: Memory,
    on_error: Any,
    when_full: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = Arrivals()
    policy = Policy(on_error=on_error, when_full=when_full)
    with CheckpointManager(
        [tmp_path / "near", far],
        10,
        memory=memory,
        policy=policy,
        observer=seen,
    ) as manager:
        handles = {}
        for step in (300, 400, 500, 600):
            handles[step] = manager.save(small_state(step), step=step)
            seen.until(step, "NVME")
            if step == 300:
                far.began.get(timeout=60)
        reason = (
            "step 400 was not uploaded to FAR: step 500 overtook it while step 300 was still being uploaded"
        )
        skipped = handles[400].result(60)
        assert skipped.skipped == (reason,)
        assert skipped.failures == ()
        assert skipped.tiers == ("MEMORY", "NVME")
        assert handles[500].result(60).skipped  # So 600 waits for the store before anything else may pass.
        far.let(10)
        assert manager.wait_pending(60)
        assert handles[600].result(0).skipped == ()
    assert ("skipped", 400, "FAR", reason) in seen.events
    assert caplog.text.count(reason) == 1
    assert steps_in(tmp_path / "far") == [300, 600]
    assert steps_in(tmp_path / "near") == [300, 400, 500, 600]


def test_a_save_that_must_arrive_is_never_overtaken(tmp_path: Path, far: Gate, memory: Memory) -> None:
    seen = Arrivals()
    with CheckpointManager(
        [tmp_path / "near", far],
        10,
        memory=memory,
        observer=seen,
    ) as manager:
        for step in range(1, 6):
            handle = manager.save(small_state(step), step=step, must_arrive=step == 2)
            seen.until(step, "NVME")
            if step == 1:
                far.began.get(timeout=60)
            if step == 4:
                overtaken = handle
        assert overtaken.result(60).skipped  # So 5 waits for the store before anything else may pass.
        far.let(10)
        assert manager.wait_pending(60)
    assert steps_in(tmp_path / "far") == [1, 2, 5]


def test_a_save_that_must_arrive_waits_for_an_image_whatever_the_policy_says(
    far: Gate, tmp_path: Path, memory: Memory
) -> None:
    with CheckpointManager(far, memory=memory, policy=Policy(when_full="skip")) as manager:
        first = manager.save(small_state(1), step=1, must_arrive=True)
        far.began.get(timeout=60)
        second = manager.save(small_state(2), step=2, must_arrive=True)
        with pytest.raises(SaveSkipped):
            manager.save(small_state(3), step=3).result(0)
        final = threading.Thread(
            target=manager.save, args=(small_state(4),), kwargs={"step": 4, "must_arrive": True}
        )
        final.start()
        final.join(0.1)
        assert final.is_alive()
        far.let(10)
        final.join(60)
        assert manager.wait_pending(60)
        assert first.exception() is None
        assert second.exception() is None
    assert steps_in(tmp_path / "far") == [1, 2, 4]


def test_with_one_slow_store_the_newest_save_overtakes_the_one_that_waits(
    far: Gate, tmp_path: Path, memory: Memory
) -> None:
    seen = Arrivals()
    with CheckpointManager(
        far,
        memory=memory,
        policy=Policy(when_full="skip"),
        observer=seen,
    ) as manager:
        handles = []
        for step in range(1, 5):
            handles.append(manager.save(small_state(step), step=step))
            seen.until(step, "MEMORY")
            # It is announced from within the hashing; only afterwards may a newer one overtake it.
            eventually(lambda: all(save.hashed.done() for save in manager._pipeline._saves), within_s=60)
            if step == 1:
                far.began.get(timeout=60)
        with pytest.raises(SaveSkipped, match="step 2 was not uploaded to FAR: step 3 overtook it"):
            handles[1].result(60)
        far.let(10)
        assert manager.wait_pending(60)  # Nothing to raise.
    assert steps_in(tmp_path / "far") == [1, 4]
    assert [event[:2] for event in seen.events if event[0] == "skipped"] == [("skipped", 2), ("skipped", 3)]


def test_snapshots_continue_while_a_slow_store_is_busy_with_an_image(
    far: Gate, job: str, memory: Memory
) -> None:
    with CheckpointManager(far, memory=memory, policy=Policy(when_full="skip")) as manager:
        manager.save(small_state(1), step=1)
        far.began.get(timeout=60)
        for step in range(2, 6):
            manager.save(small_state(step), step=step, tiers=["MEMORY"]).result(60)
            assert_is_step(manager.load(), step)
        far.let(10)


def test_a_close_that_has_to_end_gives_up_what_is_left_and_publishes_none_of_it(
    far: Gate, tmp_path: Path, memory: Memory
) -> None:
    seen = Recorder()
    manager = CheckpointManager(far, memory=memory, observer=seen)
    handles = [manager.save(small_state(step), step=step) for step in (1, 2)]
    far.began.get(timeout=60)
    began_s = time.monotonic()
    with pytest.raises(SaveFailed, match=r"not finished 0\.2 s after the manager was closed"):
        manager.close(timeout_s=0.2)
    assert time.monotonic() - began_s < 30.0
    for handle in handles:
        with pytest.raises(SaveFailed, match=r"\[FAR\] Failed to save.*not finished"):
            handle.result(0)
    assert [event[:2] for event in seen.events if event[0] == "failed"] == [("failed", 1), ("failed", 2)]
    far.let(10)  # The upload of step 1 gets through now, and nobody wants it any more.
    assert far.removed.get(timeout=60).endswith(".pt")
    assert steps_in(tmp_path / "far") == []


def test_a_close_without_a_time_limit_finishes_everything(far: Gate, tmp_path: Path, memory: Memory) -> None:
    manager = CheckpointManager(far, memory=memory)
    for step in (1, 2):
        manager.save(small_state(step), step=step)
    threading.Timer(0.2, far.let, [10]).start()
    manager.close()
    assert steps_in(tmp_path / "far") == [1, 2]


def test_abandoned_saves_wait_for_nothing_and_leave_their_snapshots(
    far: Gate, tmp_path: Path, job: str, memory: Memory
) -> None:
    manager = CheckpointManager(far, memory=memory)
    seen = manager.save(small_state(1), step=1)
    far.began.get(timeout=60)
    eventually(lambda: [info.step for info in manager.snapshots()] == [1], within_s=60)
    began_s = time.monotonic()
    manager.abandon()
    assert time.monotonic() - began_s < 30.0
    with pytest.raises(SaveFailed, match="abandoned"):
        seen.result(0)
    with CheckpointManager(tmp_path / "far", memory=memory) as again:
        assert_is_step(again.load(), 1)
        far.let(10)  # What was given up cannot publish the image that is somebody else's now.
        assert far.removed.get(timeout=60).endswith(".pt")
    assert steps_in(tmp_path / "far") == []


ENDING = """
import sys, time
from strata.checkpoint import CheckpointManager, Memory
from strata.stores import open_store
from tests.checkpoint.states import small_state

class Slow:
    tier = "S3"
    def __init__(self, inner): self._inner = inner
    def __getattr__(self, name): return getattr(self._inner, name)
    def open_write(self, key, **options):
        print("uploading", flush=True)
        time.sleep(float(sys.argv[3]))
        return self._inner.open_write(key, **options)

manager = CheckpointManager(Slow(open_store(sys.argv[1])), memory=Memory(job=sys.argv[2]))
handle = manager.save(small_state(5), step=5)
while not manager.snapshots(): time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise RuntimeError('a crash')", 1),
        ("manager.abandon()", 0),
        ("manager.abandon(); raise RuntimeError('a crash')", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_a_crash_with_an_upload_under_way_ends_at_once_and_leaves_the_snapshot(
    folder: Path, memory: Memory, ending: str, code: int
) -> None:
    command = [sys.executable, "-c", ENDING + ending, str(folder), str(memory.job), "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "uploading\n"
        ended = process.wait(60)  # The upload would take ten minutes.
    assert ended in (code, -signal.SIGINT if code == 130 else code)
    with CheckpointManager(folder, memory=memory) as manager:
        assert_is_step(manager.load(), 5)


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_a_normal_end_with_an_upload_under_way_waits_for_it(
    folder: Path, memory: Memory, ending: str, code: int
) -> None:
    command = [sys.executable, "-c", ENDING + ending, str(folder), str(memory.job), "1"]
    assert subprocess.run(command, timeout=120, stdout=subprocess.DEVNULL).returncode == code
    with CheckpointManager(folder, memory=memory) as manager:
        assert [info.step for info in manager.all_checkpoints() if "NVME" in info.tiers] == [5]
