"""`strata.recoverable`: a training function that survives the loss of other ranks inside its process.

    @strata.recoverable
    def train(run):
        model = DistributedDataParallel(build())
        with strata.elastic(model=model, ...) as job:
            for batch in job:
                ...

    train()

The function is called with the process group in place. When a rank is lost, the others leave it, by an exception out of whatever
they were doing, and enter it again in the same process, with a new group and the newest state: imports, CUDA context,
allocator, page-locked images and what `run.keep` holds stay. A replacement for the lost rank, or a spare (`--spares`) that waited at
the function's entrance, joins when it is ready. What
happens when is decided by the agent (`strata.core.jobs.regroup`); this module leaves and enters.

Without Strata's agent (plain torchrun, or no launcher at all) the function is called once, and everything is as without it.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

from strata.agent.channel import ENTRANCE_VARIABLE, KEEPS_IMAGES_VARIABLE, WorkerChannel, worker_channel
from strata.agent.frames import describe, show
from strata.agent.supervised import send_output
from strata.core.jobs.regroup import MAX_IN_PROCESS, TIMEOUT_S, Limits
from strata.processes import add_output_to
from strata.torch_compat.aborting import ProcessGroups, change_device, warm_up
from strata.torch_compat.dtensors import forget_meshes
from strata.training import live

if TYPE_CHECKING:
    from strata.training.job import ElasticJob

log = logging.getLogger("strata.training")

PATIENCE_S = 0.25
"""So long a rank that is asked to leave has to come to the end of its step, or to fail because another one has left."""
STUCK_S = 2.0
"""An aborted collective fails at once, or never does."""
EXIT_STUCK = 76
EXIT_ORPHANED = 77
LATE = 0.5
"""After so much of the time that a rank has to leave, it says where it is."""

T = TypeVar("T")
R = TypeVar("R")


class GenerationEnded(BaseException):
    """The set of ranks has changed: this one leaves its recoverable function, and enters it again.

    Like `KeyboardInterrupt` it is no `Exception`, so that a loop that carries on after a failed batch does not hold it up."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What a recoverable function is called with."""

    rank: int
    world_size: int
    local_rank: int
    generation: int
    """Counts the sets of ranks that have trained together, on this machine."""
    restarts: int
    """How often this process has entered the function again."""
    reason: str = ""
    """Why it was entered again."""
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def keep(self, name: str, factory: Callable[[], T]) -> T:
        """What `factory` makes, made once for all entries of this process: a dataset, a tokenizer, a compiled function. Not what
        belongs to a process group (DDP, FSDP, a device mesh), which must be made anew."""
        if name not in self._kept:
            self._kept[name] = factory()
        kept: T = self._kept[name]
        return kept


@overload
def recoverable(function: Callable[[Run], R], /) -> Callable[[], R]: ...


@overload
def recoverable(
    *,
    max_in_process: int = ...,
    timeout_s: float = ...,
    backend: str | None = ...,
    group_timeout_s: float | None = ...,
) -> Callable[[Callable[[Run], R]], Callable[[], R]]: ...


def recoverable(
    function: Callable[[Run], R] | None = None,
    /,
    *,
    max_in_process: int = MAX_IN_PROCESS,
    timeout_s: float = TIMEOUT_S,
    backend: str | None = None,
    group_timeout_s: float | None = None,
) -> Callable[[], R] | Callable[[Callable[[Run], R]], Callable[[], R]]:
    """Make a training function recover inside its process when other ranks are lost.

    `max_in_process` recoveries in a row without a new step, and all workers of the machine are restarted. A rank that does
    not leave within `timeout_s` is replaced. `backend` is that of the process group: by default NCCL for tensors on GPUs and
    gloo for others; `group_timeout_s` how long its collectives wait."""
    limits = Limits(max_in_process=max_in_process, timeout_s=timeout_s)
    if max_in_process < 0:
        raise ValueError(f"max_in_process ({max_in_process}) must not be negative")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s ({timeout_s!r}) must be positive")
    timeout = None if group_timeout_s is None else timedelta(seconds=group_timeout_s)

    def decorate(train: Callable[[Run], R]) -> Callable[[], R]:
        @functools.wraps(train)
        def call() -> R:
            return _Recovery(train, limits, backend, timeout).run()

        # The function is called without the run that it takes.
        del call.__wrapped__
        return call

    return decorate if function is None else decorate(function)


class _Recovery(Generic[R]):
    """One call of a recoverable function, through all its entries."""

    def __init__(
        self, train: Callable[[Run], R], limits: Limits, backend: str | None, timeout: timedelta | None
    ) -> None:
        self._train = train
        self._limits = limits
        self._backend = backend
        self._timeout = timeout
        self._groups = ProcessGroups()
        self._kept: dict[str, Any] = {}
        self._over = ""
        """Why the present generation is over."""
        self._noticed_s = 0.0
        self._late: list[threading.Timer] = []
        """Run from being asked to leave until that is done."""
        self._has_reported = False
        """The agent knows that the present generation is about to be left, and why."""
        self.reentry: live.Reentry | None = None
        self.presence: live.Presence | None = None
        self._job: ElasticJob | None = None
        self._lock = threading.Lock()
        self._channel: WorkerChannel | None = None

    def run(self) -> R:
        if "RANK" not in os.environ:
            os.environ.update(_alone())
        self._channel = worker_channel(observe=self._observe)
        entrance = os.environ.pop(ENTRANCE_VARIABLE, "")  # Not for those that this process starts.
        waits = entrance in ("wait", "spare")
        if self._channel is None and waits:
            raise ConnectionError("This process is to replace another, and its agent does not answer.")
        if self._channel is None:
            return self._enter(generation=0, restarts=0, reason="")
        if waits:
            is_spare = entrance == "spare"
            ranks = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            warm_up(ranks if is_spare else [int(os.environ.get("LOCAL_RANK", "0"))])
        limits = self._limits
        self._channel.send(
            "arrived",
            slot=self._channel.slot,
            waits=waits,
            max_in_process=limits.max_in_process,
            timeout_s=limits.timeout_s,
        )
        live.set_live_run(self)
        try:
            return self._entries(self._channel, waits=waits)
        except (SystemExit, KeyboardInterrupt):
            self._channel.send("withdrew")
            raise
        finally:
            live.set_live_run(None)
            if self.presence is not None:
                self.presence.close()
            self._channel.close()
            self._channel = None

    def _entries(self, channel: WorkerChannel, *, waits: bool) -> R:
        generation, reason, restarts = 0, "", 0
        if waits:
            generation, reason = self._let_in(channel.wait("enter"))
        gc.freeze()  # What was imported stays; what is collected between two entries is what the function has made.
        while True:
            try:
                result = self._enter(generation=generation, restarts=restarts, reason=reason)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                left_s = time.monotonic()
                noticed_s = self._noticed_s or left_s
                message = self._has_left(channel, error)
            else:
                channel.send("finished")
                noticed_s = left_s = time.monotonic()
                message = channel.wait("enter", "release")
                if message["kind"] == "release":
                    return result
                del result
            self._clean_up()
            forget_meshes()
            generation, reason = self._let_in(message)
            self.reentry = live.Reentry(noticed_s=noticed_s, left_s=left_s, reason=reason)
            restarts += 1

    def _enter(self, *, generation: int, restarts: int, reason: str) -> R:
        groups = self._groups
        try:
            self.check()
            groups.join(self._backend, timeout=self._timeout)
            self.check()
            return self._train(
                Run(
                    rank=int(os.environ["RANK"]),
                    world_size=int(os.environ["WORLD_SIZE"]),
                    local_rank=int(os.environ.get("LOCAL_RANK", "0")),
                    generation=generation,
                    restarts=restarts,
                    reason=reason,
                    _kept=self._kept,
                )
            )
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._report_own(error)
            raise
        finally:
            groups.leave()  # A rank that waits for this one fails now.

    def _report_own(self, error: BaseException) -> None:
        """An error of this rank alone is shown and reported before others notice that it leaves: what they get is a consequence."""
        if self._channel is None or self._over or _is_about_peers(error):
            return
        show(error, error.__traceback__ and error.__traceback__.tb_next)
        self._send_left(self._channel, error, is_own=True)

    def _send_left(self, channel: WorkerChannel, error: BaseException, *, is_own: bool) -> None:
        self._has_reported = True
        described = describe(error) if not isinstance(error, GenerationEnded) else None
        reason = str(error) if isinstance(error, GenerationEnded) else ""
        channel.send(
            "left",
            error=described.to_dict() if described is not None else None,
            is_own=is_own,
            reason=reason,
        )

    def _has_left(self, channel: WorkerChannel, error: BaseException) -> dict[str, Any]:
        """Report it; the agent says whether to enter again. Raises the error where the process is to end with it."""
        self._stop_watching()
        if not self._has_reported:
            self._send_left(channel, error, is_own=False)
        self._has_reported = False
        if not self._over:
            log.info("rank %s left its generation: %s", os.environ.get("RANK"), error)
        message = channel.wait("enter", "end")
        if message["kind"] == "end":
            raise error
        _forget_frames(error)
        return message

    def _let_in(self, message: dict[str, Any]) -> tuple[int, str]:
        before = int(os.environ.get("LOCAL_RANK", "0"))
        os.environ.update(message["variables"])
        if message.get("outputs") is not None:  # It was a spare.
            change_device(before, int(os.environ.get("LOCAL_RANK", "0")))
            add_output_to(*message["outputs"])
            send_output()
        os.environ[KEEPS_IMAGES_VARIABLE] = str(int(message["is_first"]))
        return int(message["generation"]), str(message["reason"])

    def _clean_up(self) -> None:
        """Before the next entry: nothing of the last one is left but what is kept."""
        gc.collect()
        gc.freeze()
        if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda).is_initialized():
            cuda.synchronize()

    # --- in the channel's thread ------------------------------------------------------------------------------

    def _observe(self, message: dict[str, Any]) -> None:
        """In the order in which the agent speaks: what is over is the generation that was entered last."""
        if message["kind"] in ("enter", "end", "release"):
            self._stop_watching()  # It may have left by itself while it was asked to.
        if message["kind"] == "enter":
            with self._lock:
                self._over, self._noticed_s, self._groups = "", 0.0, ProcessGroups()
        elif message["kind"] == "leave":
            with self._lock:
                self._over = str(message["reason"])
                self._noticed_s = self._noticed_s or time.monotonic()
                groups = self._groups
            self._watch_leaving(groups, PATIENCE_S if groups.fails_by_itself else 0.0)
        elif message["kind"] == "ended":
            # When the run is started again, this process must be gone. This thread is free whatever the others are stuck in.
            print(
                f"strata: rank {os.environ.get('RANK')} ends: its agent is lost", file=sys.stderr, flush=True
            )
            os._exit(EXIT_ORPHANED)

    def _abort(self, groups: ProcessGroups) -> None:
        with self._lock:
            if groups is not self._groups:
                return  # Those of the generation before.
            job = self._job
        if job is not None:
            job.freeze()
        groups.abort()

    def _stop_watching(self) -> None:
        for timer in self._late:
            timer.cancel()

    def _watch_leaving(self, groups: ProcessGroups, patience_s: float) -> None:
        limit_s = self._limits.timeout_s
        stuck_s = patience_s + min(STUCK_S, limit_s)
        self._late = [
            threading.Timer(stuck_s, self._look_whether_stuck, (time.monotonic() + stuck_s,)),
            threading.Timer(limit_s * LATE, _dump_stacks),
        ]
        if patience_s:
            self._late.append(threading.Timer(patience_s, self._abort, (groups,)))
        for timer in self._late:
            timer.daemon = True
            timer.start()
        # It may wait: for a group whose peers are lost before they have all connected.
        if not patience_s:
            self._abort(groups)

    def _look_whether_stuck(self, due_s: float) -> None:
        late_s = time.monotonic() - due_s
        if late_s < STUCK_S:
            _end_if_stuck()
            return
        # This process has stood still as a whole: a thread in a collective has had no time either.
        again = threading.Timer(STUCK_S, self._look_whether_stuck, (time.monotonic() + STUCK_S,))
        again.daemon = True
        self._late.append(again)
        again.start()

    # --- for the job (`strata.training.live.LiveRun`) ------------------------------------------------------------

    def attach(self, job: ElasticJob) -> None:
        with self._lock:
            self._job = job
        assert self._channel is not None
        self._channel.send("attached", is_sharded=job.is_sharded)

    def detach(self, job: ElasticJob) -> None:
        with self._lock:
            self._job = None

    def check(self) -> None:
        """Raises `GenerationEnded` where the ranks have changed."""
        if self._over:
            raise GenerationEnded(self._over)

    def others_leave(self, reason: str) -> NoReturn:
        raise GenerationEnded(reason)

    def stepped(self, step: int) -> None:
        assert self._channel is not None
        self._channel.send("stepped", step=step)

    def may_rescue(self, step: int) -> bool:
        assert self._channel is not None
        self._noticed_s = self._noticed_s or time.monotonic()
        self._groups.part()  # Saving may take a while, and others need not wait for it.
        self._channel.send("may_rescue", step=step)
        return bool(self._channel.wait("rescue")["may"])

    def rescued(self, step: int) -> None:
        pass


def _end_if_stuck() -> None:
    """Gloo may lose a send that was under way when its connection ended, and waits for a peer that was lost before it had connected:
    a rank that waits for that waits for ever. Then this process can only be replaced."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
        print(
            f"strata: rank {os.environ.get('RANK')} is stuck in an aborted collective, and is replaced",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_STUCK)


def _dump_stacks() -> None:
    print(
        f"strata: rank {os.environ.get('RANK')} was asked to leave and has not: it will be replaced. Its stacks:",
        file=sys.stderr,
        flush=True,
    )
    with suppress(OSError, ValueError):  # What takes the output may be no file.
        faulthandler.dump_traceback(all_threads=True)


def _is_about_peers(error: BaseException | None) -> bool:
    """Whether it, or what it was raised for, may be only the consequence of another rank's end."""
    while error is not None:
        described = describe(error)
        if isinstance(error, GenerationEnded) or (described is not None and described.is_about_peers):
            return True
        error = error.__cause__ or error.__context__
    return False


def _forget_frames(error: BaseException | None) -> None:
    """The function's frames hold its model."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _alone() -> dict[str, str]:
    """Torchrun's variables for one process by itself."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
