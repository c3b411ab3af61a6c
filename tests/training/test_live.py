"""The live state of a survivor: when it is complete, how it is saved alone, and how the next start finds it."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy
import psutil
import pytest
import torch
from torch import nn

import strata
from strata.agent.trace import GeneratorTrace, generators
from strata.checkpoint.copying import staging
from strata.core.jobs.live import Frozen
from strata.data.loading.steps import Batch
from strata.training import live, rng
from tests.training.loops import Crash, Loop, crash


class Run:
    """A recoverable run that lets every rank save what is complete."""

    def __init__(self, *, allows: bool = True) -> None:
        self.allows = allows
        self.attached: list[object] = []
        self.asked: list[int] = []
        self.saved: list[int] = []
        self.presence: live.Presence | None = None

    @property
    def reentry(self) -> None:
        return None

    def check(self) -> None: ...

    def stepped(self, step: int) -> None: ...

    def attach(self, job: object) -> None:
        self.attached.append(job)

    def detach(self, job: object) -> None:
        self.attached.remove(job)

    def others_leave(self, reason: str) -> NoReturn:
        raise AssertionError(reason)

    def may_rescue(self, step: int) -> bool:
        self.asked.append(step)
        return self.allows

    def rescued(self, step: int) -> None:
        self.saved.append(step)


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run()
    live.set_live_run(found)
    yield found
    live.set_live_run(None)
    staging.release_mapped()


def sparse(checkpoints: Any, **options: Any) -> Loop:
    """A loop that saves nothing by itself before its end."""
    return Loop(checkpoints, **{"save_every": 1000, "snapshot_every": 0, **options})


def leave(loop: Loop, at: int, how: Callable[[Loop, Batch], None]) -> Loop:
    """Make so many steps, then one that `how` ends."""
    with pytest.raises(Crash):
        train(loop, at, how)
    return loop


def train(loop: Loop, at: int, how: Callable[[Loop, Batch], None]) -> None:
    with loop.job as job:
        for batch in job:
            if job.step == at:
                how(loop, batch)
            loop.train(batch)


def in_forward(loop: Loop, batch: Batch) -> None:
    loop.model(batch.data[0])
    raise Crash


def asked_and_crashed(loop: Loop, batch: Batch) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    raise Crash


def in_backward(loop: Loop, batch: Batch) -> None:
    next(iter(loop.model.parameters())).register_hook(lambda _: crash())
    loop.backward(batch)


def in_optimizer(loop: Loop, batch: Batch) -> None:
    loop.backward(batch)
    loop.optimizer.register_step_pre_hook(lambda *_: crash())
    loop.optimizer.step()


def after_optimizer(loop: Loop, batch: Batch) -> None:
    loop.backward(batch)
    loop.optimizer.step()
    raise Crash


def undisturbed(tmp_path: Path, **options: Any) -> Loop:
    return sparse(tmp_path / "undisturbed", **options).run()


@pytest.mark.parametrize("how", [in_forward, in_backward])
def test_a_step_that_never_reached_the_optimizer_costs_nothing(
    tmp_path: Path, run: Run, how: Callable[[Loop, Batch], None]
) -> None:
    left = leave(sparse(tmp_path / "a"), 5, how)
    assert (run.asked, run.saved, run.attached) == ([5], [5], [])
    assert left.job.live_reason == "the live state is complete at step 5"
    again = sparse(tmp_path / "a")
    with again.job as job:
        assert (job.step, job.restored) == (5, True)
        assert job.recovery is not None
        assert (job.recovery.lost_steps, job.recovery.tier) == (0, "MEMORY")
        for batch in job:
            again.train(batch)
    assert torch.equal(again.weights, undisturbed(tmp_path).weights)
    assert all(strata.audit(tmp_path / "a", "numbers", epoch).exact for epoch in range(2))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (in_optimizer, "the optimizer was in the middle of the step after step 5"),
        (after_optimizer, "the optimizer has stepped since step 5, and the loop has not asked"),
    ],
)
def test_a_step_that_has_reached_the_optimizer_is_not_saved(
    tmp_path: Path, run: Run, how: Callable[[Loop, Batch], None], reason: str
) -> None:
    left = leave(sparse(tmp_path / "a"), 5, how)
    assert left.job.live_reason.startswith(reason)
    assert (run.asked, run.saved) == ([], [])


class Statistics(nn.Module):
    """Keeps what it has seen in a buffer too large to be copied without need."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(live.SMALL_BUFFER + 1))
        self.seen: torch.Tensor
        self.counts = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.seen.add_(x.mean().detach())
        return x


def with_model(loop: Loop, *modules: nn.Module) -> Loop:
    loop.model.extend(modules)
    return loop


def noisy(folder: Path) -> Loop:
    """Running statistics, and draws from every generator, in each forward pass."""

    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 + random.random() + numpy.random.randn() + numpy.random.rand())

    random.seed(1)
    numpy.random.seed(1)
    return with_model(
        sparse(folder), nn.BatchNorm1d(1), nn.Dropout(0.3), Statistics(), Draws(), nn.BatchNorm1d(1)
    )


def buffers(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in loop.model.named_buffers()}


def test_what_a_forward_pass_changes_is_put_back(tmp_path: Path, run: Run) -> None:
    left = leave(noisy(tmp_path / "a"), 5, in_forward)
    assert left.job.live_reason == "the live state is complete at step 5"
    again = noisy(tmp_path / "a").run()
    expected = noisy(tmp_path / "b").run()
    assert torch.equal(again.weights, expected.weights)
    for name, buffer in buffers(expected).items():
        assert torch.equal(buffers(again)[name], buffer), name


def test_a_buffer_that_nobody_has_a_copy_of_makes_a_state_incomplete(tmp_path: Path, run: Run) -> None:
    statistics = Statistics()
    statistics.counts = False
    loop = with_model(sparse(tmp_path / "a"), statistics)

    def first_change(loop: Loop, batch: Batch) -> None:
        statistics.counts = True
        in_forward(loop, batch)

    leave(loop, 5, first_change)
    assert loop.job.live_reason == "changed since step 5, without a copy: '3.seen'"
    assert run.saved == []


def test_a_parameter_that_was_changed_by_hand_makes_a_state_incomplete(tmp_path: Path, run: Run) -> None:
    def by_hand(loop: Loop, batch: Batch) -> None:
        with torch.no_grad():
            next(iter(loop.model.parameters())).mul_(2)
        raise Crash

    loop = leave(sparse(tmp_path / "a"), 5, by_hand)
    assert loop.job.live_reason == "changed since step 5, without a copy: '0.weight'"


def test_a_setting_that_was_changed_since_makes_a_state_incomplete(tmp_path: Path, run: Run) -> None:
    def slow_down(loop: Loop, batch: Batch) -> None:
        loop.optimizer.param_groups[0]["lr"] /= 2
        raise Crash

    loop = leave(sparse(tmp_path / "a"), 5, slow_down)
    assert "the settings of the optimizer" in loop.job.live_reason


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path, run: Run) -> None:
    loop = leave(sparse(tmp_path / "a"), 0, in_forward)
    assert loop.job.live_reason == "no step was completed since the job was entered"


def test_who_is_not_asked_to_saves_nothing(tmp_path: Path, run: Run) -> None:
    run.allows = False
    leave(sparse(tmp_path / "a"), 5, in_forward)
    assert (run.asked, run.saved) == ([5], [])
    assert not sparse(tmp_path / "a").run().job.restored


def test_a_rescue_that_fails_leaves_the_error_and_says_why(tmp_path: Path, run: Run) -> None:
    loop = leave(sparse(tmp_path / "a", snapshot_limit_bytes=10), 5, in_forward)
    assert loop.job.live_reason.endswith(
        "could not be saved: It is larger than the limit for snapshots (snapshot_limit_bytes)."
    )
    assert run.saved == []


def test_without_a_recoverable_run_nothing_is_watched(tmp_path: Path) -> None:
    loop = leave(sparse(tmp_path / "a"), 5, in_forward)
    loop.job.freeze()
    assert loop.job.live_reason == ""
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not sparse(tmp_path / "a").run().job.restored


def test_a_snapshot_of_the_same_step_is_not_made_again(tmp_path: Path, run: Run) -> None:
    loop = Loop(tmp_path / "a", snapshot_every=1)

    def settled(loop: Loop, batch: Batch) -> None:
        manager = loop.job._manager
        assert manager is not None
        assert manager.wait_idle(60)
        in_forward(loop, batch)

    leave(loop, 5, settled)
    assert run.saved == [5]
    again = Loop(tmp_path / "a")
    with again.job as job:
        assert job.step == 5
        manager = job._manager
        assert manager is not None
        (newest, *_) = manager.snapshots()
        assert newest.generation == 1
        assert job._opened.board not in newest.checkpoint_id


def test_gradients_of_a_global_batch_that_has_not_ended_are_left_out(tmp_path: Path, run: Run) -> None:
    """In the middle of accumulating, the state is that of the step before."""
    options = {"sampler": {"micro_batch_size": 2}}

    def second_part(loop: Loop, batch: Batch) -> None:
        if batch.step.start != batch.step.slice_start:
            raise Crash

    leave(sparse(tmp_path / "a", **options), 5, second_part)
    assert run.saved == [5]
    again = sparse(tmp_path / "a", **options).run()
    assert torch.equal(again.weights, undisturbed(tmp_path, **options).weights)
    assert all(strata.audit(tmp_path / "a", "numbers", epoch).exact for epoch in range(2))


@pytest.mark.parametrize(
    ("world", "later"), [(2, "step 7 began after the process groups were aborted"), (1, "complete at step 7")]
)
def test_a_step_that_began_before_the_abort_counts_and_a_later_one_only_of_a_rank_by_itself(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, world: int, later: str
) -> None:
    monkeypatch.setattr(live, "rank_and_world", lambda: (0, world))

    def freeze_elsewhere(loop: Loop) -> None:
        if loop.job.step == 5:
            thread = threading.Thread(target=loop.job.freeze)
            thread.start()
            thread.join()

    for at, reason in [(6, "complete at step 6"), (7, later)]:
        loop = sparse(tmp_path / str(at))
        loop.optimizer.register_step_post_hook(lambda *_, loop=loop: freeze_elsewhere(loop))
        leave(loop, at, in_forward)
        assert reason in loop.job.live_reason


class Event:
    """A CUDA event, as far as it is asked."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


@pytest.mark.parametrize(("is_done", "device"), [(True, "done"), (False, "pending")])
def test_what_the_device_has_done_is_asked_before_the_abort(
    tmp_path: Path, run: Run, is_done: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = Event()
    event.is_done = is_done
    monkeypatch.setattr(live, "_record", lambda _: event)
    monkeypatch.setattr(live, "_devices_of", lambda _: [torch.device("cuda:0")])
    loop = sparse(tmp_path / "a")

    def frozen(loop: Loop, batch: Batch) -> None:
        loop.job.freeze()
        event.is_done = True  # What an aborted collective ends with is no result.
        watched = loop.job._live
        assert watched is not None
        assert watched._frozen == Frozen(step=5, began=5, device=device)  # type: ignore[arg-type]
        raise Crash

    leave(loop, 5, frozen)
    assert run.saved == ([5] if is_done else [])


def test_a_generator_taken_as_bytes_is_what_capture_says() -> None:
    watch = rng.Watch()
    for draw in (
        lambda: None,
        torch.rand,
        random.random,
        numpy.random.rand,
        numpy.random.randn,
        random.gauss,
    ):
        draw(1) if draw is torch.rand else draw()
        taken, expected = watch.take().states(), rng.capture()
        assert taken.keys() == expected.keys()
        assert torch.equal(taken["torch"], expected["torch"])
        assert taken["python"] == expected["python"]
        assert torch.equal(taken["numpy"][1], expected["numpy"][1])
        assert [taken["numpy"][0], *taken["numpy"][2:]] == [expected["numpy"][0], *expected["numpy"][2:]]


def test_generator_states_are_read_again_after_every_change_and_only_then() -> None:
    watch = rng.Watch()
    for _ in range(700):  # More than the state of Python's generator has words.
        random.random()
        torch.rand(1)
        assert watch.take() == rng.Watch().take()
    before = watch.take()
    assert all(new is old for new, old in zip(watch.take()[:3], before[:3], strict=True))
    random.seed(3)
    assert watch.take().python != before.python


def test_python_whose_generator_looks_otherwise_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_python_memory", lambda: None)
    watch = rng.Watch()
    for draw in (random.random, random.random, lambda: random.gauss(0, 1), lambda: random.seed(5)):
        draw()
        assert watch.take().states()["python"] == rng.capture()["python"]


def test_generators_of_the_last_two_steps_survive_their_rank() -> None:
    watch = rng.Watch()
    trace = GeneratorTrace("job", rank=3, generation=2)
    taken = {}
    for step in range(7, 11):
        torch.rand(1)
        taken[step] = watch.take()
        trace.leave(step, taken[step])
    for step in (9, 10):
        assert generators("job", step=step, generation=2) == {3: taken[step]}
    assert generators("job", step=8, generation=2) == {}
    assert generators("job", step=10, generation=1) == {}
    trace.close()


def figures() -> tuple[int, int, int]:
    """Threads, descriptors and mappings of this process."""
    gc.collect()
    process = psutil.Process()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "strata-" in line]
    return process.num_threads(), process.num_fds(), len(mapped)


def test_entering_again_maps_no_new_memory_and_leaves_nothing_behind(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[Path] = []
    map_file = staging.ImageBuffer._map_file

    def counted(self: staging.ImageBuffer, *, populate: bool) -> torch.Tensor:
        if self._bytes is None:
            mapped.append(self.path)
        return map_file(self, populate=populate)

    monkeypatch.setattr(staging.ImageBuffer, "_map_file", counted)
    loops = []
    for entry in range(60):
        loop = sparse(tmp_path / "a", epochs=1000)
        leave(loop, 2 * entry + 1, in_forward)
        assert loop.job.live_reason == f"the live state is complete at step {2 * entry + 1}"
        if entry == 9:
            settled, already = figures(), len(mapped)
        loops.append(loop.job.step)
        del loop
    assert loops == [2 * entry + 1 for entry in range(60)]
    assert len(mapped) == already <= 2
    after = figures()
    assert all(now <= before + 2 for now, before in zip(after, settled, strict=True)), (settled, after)
    assert not any(thread.name.startswith("strata-") for thread in threading.enumerate() if not thread.daemon)
    assert os.listdir(tmp_path / "memory")
    staging.release_mapped()


def test_who_is_asked_to_leave_while_it_leaves_a_generation_enters_no_other(run: Run, tmp_path: Path) -> None:
    """Its agent would wait for its end until it kills it."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        leave(sparse(tmp_path), 3, in_forward)
        assert came == []
        leave(sparse(tmp_path), 5, asked_and_crashed)
        assert came == [signal.SIGTERM], "what ends the process has the signal now"
    finally:
        signal.signal(signal.SIGTERM, before)
