"""One rank of a small elastic job on gloo, that tests hold, kill and count: `python -m tests.training.rank_script --help`.

It appends a line to the file `events` of its control folder each time it is about to make a step, and goes no further than
the step in the file `hold` there, until that is changed or it is asked to leave. That it was asked is said by a file `asked-PID`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data._utils import worker as loader_process

from tests.training.loops import SAMPLES, Loop

POLL_S = 0.005
LOADERS_LOOK_EVERY_S = 60.0
"""After whether their rank still lives; 5 s otherwise, which a busy machine may need for other things."""


class Control:
    """What the test says, and what it hears."""

    def __init__(self, folder: Path, loop: Loop) -> None:
        self._folder = folder
        self._loop = loop
        self._events = os.open(folder / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def reached(self) -> None:
        job = self._loop.job
        facts = (job.rank, job.step, os.getpid(), job.world_size, job.generation)
        os.write(self._events, (" ".join(map(str, facts)) + "\n").encode())
        while job.step >= self._limit() and job._preemption is not None and not job._preemption.requested:
            time.sleep(POLL_S)
        if job._preemption is not None and job._preemption.requested:
            (self._folder / f"asked-{os.getpid()}").touch()

    def _limit(self) -> float:
        try:
            return int((self._folder / "hold").read_text())
        except FileNotFoundError:
            return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--checkpoints", action="append", required=True, help="near to far")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--snapshot-every", type=int, default=1)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0, help="what a step takes at least")
    parser.add_argument("--break-at", type=int)
    parser.add_argument("--job")
    parser.add_argument("--coordinator")
    args = parser.parse_args()
    loader_process.MP_STATUS_CHECK_INTERVAL = LOADERS_LOOK_EVERY_S  # type: ignore[attr-defined]
    distributed.init_process_group("gloo")
    loop = Loop(
        args.checkpoints,
        samples=args.samples,
        width=args.width,
        save_every=args.save_every,
        snapshot_every=args.snapshot_every,
        loader={"num_workers": args.loader_workers},
        job=args.job,
        coordinator=args.coordinator,
        unreachable_timeout_s=60.0,
    )
    loop.model = DistributedDataParallel(loop.model)  # type: ignore[assignment]
    control = Control(args.control, loop)
    with loop.job as job:
        for batch in job:
            if (
                job._manager is not None
            ):  # No save is skipped because another is under way: what was saved is known.
                assert job._manager.wait_idle(120)
            control.reached()
            time.sleep(args.step_s)
            loop.train(batch)
            if args.break_at is not None and job.step + 1 == args.break_at:
                break
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
