"""What an elastic job restores, saves and leaves behind, in one process with real stores."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import strata
from strata.checkpoint.errors import CheckpointError, FinalSaveFailed, LoadFailed, RunInUse, RunMismatch
from strata.checkpoint.errors import StateMismatch as WrongModel
from strata.data.errors import DataError
from strata.data.errors import StateMismatch as WrongData
from strata.errors import StrataError
from strata.stores import open_store
from strata.stores.faulty import Fault, FaultyStore, Operation
from strata.training import ElasticOptions, Preempted
from tests.support import eventually
from tests.training.loops import BATCH, SAMPLES, Crash, Loop, crash, steps_in

STEPS = 2 * SAMPLES // BATCH


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_MEMORY_ROOT", str(tmp_path_factory.mktemp("memory")))
        return Loop(tmp_path_factory.mktemp("run")).run().weights


def assert_exact(folder: Path, undisturbed: torch.Tensor, loop: Loop) -> None:
    assert torch.equal(loop.weights, undisturbed)
    for epoch in range(2):
        report = strata.audit(folder, "numbers", epoch)
        assert report.exact, report.reason


def crash_after_saving(loop: Loop, *, at: int) -> None:
    """Crash in a step, when every save that was started before it has ended."""

    def wait_and_crash() -> None:
        assert loop.job._manager is not None
        assert loop.job._manager.wait_pending(60)
        raise Crash

    with pytest.raises(Crash):
        loop.run(stop_at=at, how=wait_and_crash)


def images(root: Path) -> list[Path]:
    return list(root.rglob("archive.pt"))


# --- who a run is -----------------------------------------------------------------------------------------------


def test_an_unrelated_script_does_not_find_the_images_of_another(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        Loop(tmp_path / "a").run(stop_at=6, how=crash)
    other = Loop(tmp_path / "b")
    with other.job as job:
        assert (job.step, job.restored) == (0, False)


def test_removing_the_folder_starts_afresh(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        Loop(tmp_path / "a").run(stop_at=6, how=crash)
    shutil.rmtree(tmp_path / "a")
    with Loop(tmp_path / "a").job as job:
        assert (job.step, job.restored) == (0, False)


def test_another_model_is_a_clear_error_and_changes_nothing(tmp_path: Path) -> None:
    crash_after_saving(Loop(tmp_path / "a"), at=6)
    before = steps_in(tmp_path / "a")
    with pytest.raises(WrongModel, match=r"model_state_dict"), Loop(tmp_path / "a", width=7).job:
        pass
    assert steps_in(tmp_path / "a") == before
    with Loop(tmp_path / "a").job as job:
        assert job.step == 6 - 1  # The step it crashed in was not over.


def test_two_jobs_with_one_name_in_one_process_keep_to_themselves(tmp_path: Path) -> None:
    one, two = Loop(tmp_path / "a", job="same"), Loop(tmp_path / "b", job="same")
    with one.job as first, two.job as second:
        batches = iter(first)
        for _ in range(6):
            one.train(next(batches))
        for batch in second:
            two.train(batch)
            break
        assert first.run != second.run
        del batches
    with Loop(tmp_path / "b", job="same").job as job:
        assert job.step == 1


def test_a_folder_remembers_the_name_of_its_run(tmp_path: Path) -> None:
    Loop(tmp_path / "a", job="mine").run(stop_at=3)
    with (
        pytest.raises(RunMismatch, match=r"belongs to the run 'mine'"),
        Loop(tmp_path / "a", job="other").job,
    ):
        pass
    with Loop(tmp_path / "a", job="mine").job as job:
        assert job.step == 3


def test_a_second_live_job_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    with Loop(tmp_path / "a").job:
        with pytest.raises(RunInUse, match=f"process {os.getpid()} on"), Loop(tmp_path / "a").job:
            pass
    with Loop(tmp_path / "a").job:
        pass


def test_a_superseded_process_publishes_nothing_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TORCHELASTIC_RUN_ID", "launch-1"
    )  # Both belong to one launch: the second is its restart.

    def restart() -> None:
        monkeypatch.setattr(
            "strata.checkpoint.catalog.runs._held_here", set()
        )  # As if it were another process.
        Loop(tmp_path / "a", max_steps=3).run()

    with pytest.raises(CheckpointError, match="generation 2"):
        Loop(tmp_path / "a", snapshot_every=0).run(stop_at=2, how=restart)
    assert steps_in(tmp_path / "a") == [3]


def test_destinations_of_different_runs_are_refused(tmp_path: Path) -> None:
    Loop(tmp_path / "a").run(stop_at=2)
    Loop(tmp_path / "b").run(stop_at=2)
    with pytest.raises(RunMismatch, match="different runs"), Loop([tmp_path / "a", tmp_path / "b"]).job:
        pass


def test_a_run_in_memory_alone_is_known_by_its_name(memory_root: Path) -> None:
    crash_after_saving(Loop([], job="mine"), at=6)
    with Loop([], job="other").job as job:
        assert not job.restored
    with Loop([], job="mine").job as job:
        assert job.step == 5
    assert not images(memory_root)


# --- starting ---------------------------------------------------------------------------------------------------


def refusing(*names: str) -> object:
    def choose(found: Operation, chance: object) -> Fault | None:
        return Fault.REFUSED if found.name in names and not found.key.startswith("leases/") else None

    return choose


@pytest.mark.parametrize("operation", ["list", "read"])
def test_a_store_that_does_not_answer_is_fatal_and_named(
    tmp_path: Path, memory_root: Path, operation: str
) -> None:
    Loop(tmp_path / "a").run(stop_at=8)
    before = steps_in(tmp_path / "a")
    away = FaultyStore(open_store(tmp_path / "a"), choose=refusing(operation))  # type: ignore[arg-type]
    with pytest.raises(LoadFailed, match=str(tmp_path / "a")), Loop(away).job:
        pytest.fail("training began")
    assert steps_in(tmp_path / "a") == before
    with Loop(tmp_path / "a").job as job:
        assert job.step == 8


def test_a_store_that_comes_back_in_time_is_waited_for(tmp_path: Path) -> None:
    Loop(tmp_path / "a").run(stop_at=8)
    refusals = iter(range(3))

    def choose(found: Operation, chance: object) -> Fault | None:
        return Fault.REFUSED if found.name == "list" and next(refusals, None) is not None else None

    slow = FaultyStore(open_store(tmp_path / "a"), choose=choose)
    with Loop(slow, unreachable_timeout_s=30.0).job as job:
        assert job.step == 8


def test_payloads_that_cannot_be_read_do_not_make_training_start_over(tmp_path: Path) -> None:
    Loop(tmp_path / "a").run(stop_at=8)
    for payload in (tmp_path / "a").glob("*.pt"):
        raw = bytearray(payload.read_bytes())
        raw[len(raw) // 2] ^= 1
        payload.write_bytes(raw)
    with pytest.raises(LoadFailed, match="none of them can be loaded"), Loop(tmp_path / "a").job:
        pass
    assert steps_in(tmp_path / "a")


def test_manifests_that_cannot_be_read_do_not_make_training_start_over(tmp_path: Path) -> None:
    Loop(tmp_path / "a").run(stop_at=8)
    for manifest in (tmp_path / "a").glob("*.manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.raises(LoadFailed, match="none of them can be loaded"), Loop(tmp_path / "a").job:
        pass


def test_damaged_images_are_passed_over_for_the_next_best(tmp_path: Path, memory_root: Path) -> None:
    crash_after_saving(Loop(tmp_path / "a", snapshot_every=5), at=7)
    for image in images(memory_root):
        with open(image, "r+b") as file:
            file.seek(image.stat().st_size // 2)
            file.write(b"damage")
    with Loop(tmp_path / "a").job as job:
        assert job.step == 4
        assert job.recovery is not None
        assert any("bytes changed" in reason for reason in job.recovery.reasons)


def test_images_that_are_missing_or_empty_are_passed_over(tmp_path: Path, memory_root: Path) -> None:
    crash_after_saving(Loop(tmp_path / "a", snapshot_every=5), at=7)
    one, *others = images(memory_root)
    one.unlink()
    for other in others:
        other.write_bytes(b"")
    with Loop(tmp_path / "a").job as job:
        assert job.step == 4


def test_every_start_says_in_one_line_what_it_restored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    crash_after_saving(Loop(tmp_path / "a", snapshot_every=3, save_every=100), at=8)
    assert "resumed" not in capfd.readouterr().err
    with Loop(tmp_path / "a").job:
        pass
    said = [line for line in capfd.readouterr().err.splitlines() if "resumed" in line]
    assert len(said) == 1
    assert "resumed at step 6 from MEMORY, 2 steps lost" in said[0]


# --- ending -----------------------------------------------------------------------------------------------------


def test_break_saves_where_the_loop_was_left(tmp_path: Path, memory_root: Path) -> None:
    Loop(tmp_path / "a", save_every=100).run(stop_at=5)
    assert steps_in(tmp_path / "a") == [5]
    assert not images(memory_root)


def test_the_last_step_is_durable_also_when_its_own_save_failed(tmp_path: Path) -> None:
    failures = iter(range(2))

    def choose(found: Operation, chance: object) -> Fault | None:
        is_payload = found.name == "commit" and found.key.endswith(".pt") and "00000016" in found.key
        return Fault.REFUSED if is_payload and next(failures, None) is not None else None

    Loop(FaultyStore(open_store(tmp_path / "a"), choose=choose)).run()
    assert steps_in(tmp_path / "a")[0] == STEPS


def test_a_final_state_that_is_not_durable_fails_the_job_and_stays_in_memory(
    tmp_path: Path, memory_root: Path
) -> None:
    def choose(found: Operation, chance: object) -> Fault | None:
        is_payload = found.name == "commit" and found.key.endswith(".pt") and "00000016" in found.key
        return Fault.REFUSED if is_payload else None

    with pytest.raises(FinalSaveFailed, match="start the job again"):
        Loop(FaultyStore(open_store(tmp_path / "a"), choose=choose)).run()
    assert images(memory_root)
    assert Loop(tmp_path / "a").run().job.step == STEPS
    assert steps_in(tmp_path / "a")[0] == STEPS


def test_the_final_state_reaches_every_destination(tmp_path: Path) -> None:
    def choose(found: Operation, chance: object) -> Fault | None:
        return Fault.REFUSED if found.name == "commit" and found.key.endswith(".pt") else None

    far = FaultyStore(open_store(tmp_path / "far"), choose=choose)
    with pytest.raises(FinalSaveFailed, match="far"):
        Loop([tmp_path / "near", far]).run()
    assert steps_in(tmp_path / "near")[0] == STEPS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_no_images(
    tmp_path: Path, memory_root: Path, number: signal.Signals
) -> None:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    loop = Loop(tmp_path / "a", epochs=None, max_steps=1_000_000, save_every=1_000_000, snapshot_every=100)
    with pytest.raises(Preempted) as left:
        loop.run(stop_at=5, how=lambda: os.kill(os.getpid(), number))
    assert left.value.code == 0
    assert steps_in(tmp_path / "a") == [loop.job.step]
    assert not list(memory_root.rglob("*"))
    assert handlers == {n: signal.getsignal(n) for n in handlers}


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Loop(tmp_path / "a", save_every=100).run(stop_at=5, how=twice)
    assert steps_in(tmp_path / "a") == []


def test_a_finished_run_is_not_saved_again(tmp_path: Path) -> None:
    Loop(tmp_path / "a").run()
    before = sorted(path.name for path in (tmp_path / "a").glob("*.pt"))
    assert Loop(tmp_path / "a").run().job.step == STEPS
    assert sorted(path.name for path in (tmp_path / "a").glob("*.pt")) == before


# --- iterating --------------------------------------------------------------------------------------------------


def test_break_evaluate_and_iterate_again_is_exact(tmp_path: Path, undisturbed: torch.Tensor) -> None:
    loop = Loop(tmp_path / "a")
    with loop.job as job:
        while job.step < STEPS:
            for batch in job:
                loop.train(batch)
                if batch.step.batch_stop % (3 * BATCH) == 0:
                    break
            with torch.no_grad():
                loop.model(torch.zeros(1, 4))
    assert_exact(tmp_path / "a", undisturbed, loop)


def test_an_iterator_that_is_held_counts_what_was_trained(tmp_path: Path, undisturbed: torch.Tensor) -> None:
    """As `next(iter(job))` does, or a progress bar that keeps what it went over."""
    loop = Loop(tmp_path / "a")
    with loop.job as job:
        batches = iter(job)
        loop.train(next(batches))
        loop.train(next(batches))
    assert steps_in(tmp_path / "a")[0] == 2
    assert list(batches) == []
    again = Loop(tmp_path / "a")
    again.run()
    assert_exact(tmp_path / "a", undisturbed, again)


def test_an_iterator_that_outlives_a_failed_job_is_collected_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", noticed.append)
    loop = Loop(tmp_path / "a")
    held = []

    def fail() -> None:
        with loop.job as job:
            held.append(iter(job))
            loop.train(next(held[0]))
            raise Crash

    with pytest.raises(Crash):
        fail()
    held.clear()
    assert noticed == []


def test_a_batch_that_was_left_untrained_is_read_again(tmp_path: Path, undisturbed: torch.Tensor) -> None:
    loop = Loop(tmp_path / "a")
    with loop.job as job:
        for number, batch in enumerate(job):
            if number == 5:
                loop.backward(batch)  # Half a step: its gradient must not stay.
                break
            loop.train(batch)
        assert job.step == 5
        for batch in job:
            loop.train(batch)
    assert_exact(tmp_path / "a", undisturbed, loop)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_that_the_script_survives_costs_nothing(
    tmp_path: Path, undisturbed: torch.Tensor, workers: int
) -> None:
    loop = Loop(tmp_path / "a", loader={"num_workers": workers})
    with loop.job as job:
        try:
            for batch in job:
                if job.step == 5:
                    raise ValueError("out of memory, say")
                loop.train(batch)
        except ValueError:
            pass
        for batch in job:
            loop.train(batch)
    assert_exact(tmp_path / "a", undisturbed, loop)


def test_training_again_after_an_exception_resumes(tmp_path: Path, undisturbed: torch.Tensor) -> None:
    with pytest.raises(Crash):
        Loop(tmp_path / "a").run(stop_at=6, how=crash)
    loop = Loop(tmp_path / "a").run()
    assert_exact(tmp_path / "a", undisturbed, loop)


@pytest.mark.parametrize("at", [1, 4, 8, 9, 15])
def test_accumulating_over_several_batches_is_exact_after_a_crash(tmp_path: Path, at: int) -> None:
    """The script steps after every third batch: a crash in between must not count batches that no step was made with."""

    def run(folder: Path, *, crash_at: int | None) -> Loop:
        loop = Loop(folder)
        with loop.job as job:
            for number, batch in enumerate(job, 1):
                loop.backward(batch, scale=1 / 3)
                if number % 3 == 0:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                if number == crash_at:
                    raise Crash
        return loop

    calm = run(tmp_path / "calm", crash_at=None)
    with pytest.raises(Crash):
        run(tmp_path / "a", crash_at=at)
    again = run(tmp_path / "a", crash_at=None)
    assert again.job.step == calm.job.step
    assert torch.equal(again.weights, calm.weights)
    for epoch in range(2):
        assert strata.audit(tmp_path / "a", "numbers", epoch).exact


def test_micro_batches_are_exact_after_a_crash(tmp_path: Path) -> None:
    keywords: dict[str, Any] = {"sampler": {"micro_batch_size": 3}}
    calm = Loop(tmp_path / "calm", **keywords).run()
    with pytest.raises(Crash):
        Loop(tmp_path / "a", **keywords).run(stop_at=6, how=crash)
    again = Loop(tmp_path / "a", **keywords).run()
    assert_exact(tmp_path / "a", calm.weights, again)


def test_a_step_within_a_global_batch_is_a_clear_error(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a", sampler={"micro_batch_size": 2})

    def step_every_time() -> None:
        with loop.job as job:
            for batch in job:
                loop.backward(batch)
                loop.optimizer.step()

    with pytest.raises(StrataError, match="ends_step"):
        step_every_time()


def test_an_optimizer_that_never_steps_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.training.job.UNSTEPPED_LIMIT", 5)
    loop = Loop(tmp_path / "a")
    with pytest.raises(StrataError, match="has not stepped"), loop.job as job:
        for _ in job:
            pass


def test_steps_that_cannot_be_seen_are_counted_by_batches(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a", commit_on="batch")
    with loop.job as job:
        for _ in job:
            pass
        assert job.step == STEPS


def test_a_renamed_dataset_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    Loop(tmp_path / "a").run(stop_at=3)
    with pytest.raises(WrongData, match="numbers"), Loop(tmp_path / "a", sampler={"dataset": "renamed"}).job:
        pass


def test_a_dataset_without_a_single_batch_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a", samples=5, epochs=None, max_steps=3, sampler={"drop_last": True})
    with pytest.raises(ValueError, match="global batch"), loop.job:
        pass


def test_several_loaders_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a")
    with pytest.raises(DataError, match="data must be one loader, not 2"):
        strata.elastic(
            model=loop.model,
            optimizer=loop.optimizer,
            data=[loop.loader, loop.loader],  # type: ignore[list-item]
            checkpoints=tmp_path / "a",
            epochs=1,
        )


@pytest.mark.parametrize(
    "options",
    [
        {"save_every": 0},
        {"snapshot_every": -1},
        {"keep_count": 0},
        {"on_error": "ignore"},
        {"retries": 1.5},
        {"retry_delay_s": -1.0},
    ],
)
def test_options_are_checked_when_they_are_created(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ElasticOptions(**options)  # type: ignore[arg-type]


def test_an_error_while_entering_leaves_nothing_behind(tmp_path: Path, memory_root: Path) -> None:
    handlers = signal.getsignal(signal.SIGTERM)
    threads = {thread.name for thread in threading.enumerate()}
    Loop(tmp_path / "a").run(stop_at=3)
    with pytest.raises(WrongModel), Loop(tmp_path / "a", width=9).job:
        pass
    assert signal.getsignal(signal.SIGTERM) is handlers
    idle = {"strata-digest", "strata-nvme", "strata-orphans"}
    eventually(  # A thread that was asked to end is not waited for long after a failure.
        lambda: {t.name for t in threading.enumerate()} - threads <= idle,
        within_s=60,
        what=lambda: f"only idle threads are left: {threading.enumerate()}",
    )
    with Loop(tmp_path / "a").job as job:
        assert job.step == 3


def test_a_job_in_another_thread_trains_and_leaves_signals_alone(
    tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    found: list[Loop] = []
    thread = threading.Thread(target=lambda: found.append(Loop(tmp_path / "a").run()))
    thread.start()
    thread.join(120)
    assert_exact(tmp_path / "a", undisturbed, found[0])


def test_memory_that_is_too_small_for_images_costs_no_durable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: torch.Tensor
) -> None:
    monkeypatch.setattr("strata.checkpoint.copying.staging._free_bytes", lambda root: 0)
    loop = Loop(tmp_path / "a").run()
    assert_exact(tmp_path / "a", undisturbed, loop)
    assert steps_in(tmp_path / "a")[0] == STEPS


def test_training_can_wait_for_each_save(tmp_path: Path) -> None:
    def slowly(found: Operation, chance: object) -> Fault | None:
        threading.Event().wait(0.1)
        return None

    slow = FaultyStore(open_store(tmp_path / "a"), choose=slowly)
    loop = Loop(slow, save_every=2, wait_for_saves=True, epochs=None, max_steps=6)
    with loop.job as job:
        for batch in job:
            assert steps_in(tmp_path / "a")[:1] == ([job.step // 2 * 2] if job.step >= 2 else [])
            loop.train(batch)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_snapshots_as_wanted_are_kept_in_memory(
    tmp_path: Path, memory_root: Path, count: int
) -> None:
    crash_after_saving(Loop(tmp_path / "a", snapshot_count=count), at=7)
    assert len(images(memory_root)) == count
    with Loop(tmp_path / "a", snapshot_count=count).job as job:
        assert job.step == 6


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "two"])
def test_a_number_of_snapshots_that_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"snapshot_count .* must be a whole number of at least 1"):
        ElasticOptions(snapshot_count=wrong)
