"""Where the time of a recovery went: detect, rendezvous, spawn, load, first step; or, where the process has survived: detect, abort,
regroup, load, first step.

Clocks: `time.monotonic` is the machine's, so the timestamps of dead processes, of the agent and of this one can be
compared. Each rank leaves the time of its last step in a small file below the memory root; the agent's rendezvous
leaves when it began and ended; this process knows its own start. What cannot be known (another machine, another
rendezvous back end) is counted to the phase around it, never guessed. A run removes its timestamps when it ends; what one
that was killed left is removed by another run, a day after its last moment. A folder that a process holds beside them, as an agent
does for its socket, stays as long as that process, and no longer.

Beside them, in a recoverable run, each rank leaves its random number generators as they were after its last two steps: a
survivor that saves the state of such a step adds those of the ranks that were lost.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from mmap import mmap
from pathlib import Path

from strata import locks
from strata.core.text import counted
from strata.files import write_file
from strata.processes import this_process
from strata.shared_memory import NOTED, VERIFIED_MODULES, make_private, remove_empty, run_folder

KEPT_S = 86_400.0
PHASES = ("detect", "abort", "regroup", "rendezvous", "spawn", "load", "first_step")
_FOOTPRINT = struct.Struct(
    "<ddqq"
)  # of the step, of the process's start (monotonic seconds); step; world size


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One recovery, in seconds by phase."""

    phases: dict[str, float]
    resumed_step: int
    lost_steps: int
    tier: str
    world_before: int
    world_after: int
    reasons: tuple[str, ...] = ()
    survived: int = 0
    """How many processes were there before and after (`strata.core.jobs.roster.Changes`)."""
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    cause: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {self.phases[name]:.2f}" for name in PHASES if name in self.phases)
        return (
            f"recovered in {self.total_s:.2f} s ({parts}) at step {self.resumed_step} from {self.tier}, "
            f"{counted(self.lost_steps, 'step')} lost, {self.world_before} -> {self.world_after} workers"
            + (f", {self.survived} of them survived in their processes" if self.survived else "")
        )


def clear_run(job: str, *, root: Path | None = None) -> None:
    """Remove what a finished run left."""
    folder = run_folder(job, root=root)
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
    remove_empty(folder)


def clear_old_runs(*, keep: str, root: Path | None = None) -> None:
    """Remove what runs left that were killed long ago, or before this machine was started, and what agents left that were killed;
    `keep` is a job."""
    mine = run_folder(keep, root=root)
    with suppress(OSError):
        for folder in mine.parent.iterdir():
            held = locks.is_held(folder)
            if folder != mine and (held is False or (held is None and _is_old(folder))):
                shutil.rmtree(folder, ignore_errors=True)  # Does not follow links.


def _is_old(folder: Path) -> bool:
    """By the timestamps themselves: a step is written through a mapping, which leaves a file's own time as it was."""
    timestamps = [footprint.mono_s for footprint in _footprints_in(folder)]
    met = _read_rendezvous(folder)
    if met is not None:
        timestamps.append(met[1])
    if not timestamps:  # A run that never made a step, or has not made one yet.
        return time.time() - folder.stat().st_mtime > KEPT_S
    age_s = time.monotonic() - max(timestamps)
    return not 0.0 <= age_s <= KEPT_S


@dataclass(frozen=True, slots=True)
class Footprint:
    mono_s: float
    born_mono_s: float
    """When the process that made the step began."""
    step: int
    world_size: int


class Footprints:
    """This rank's last step, where it survives the rank. Writing one costs less than a microsecond."""

    def __init__(self, *jobs: str, rank: int, root: Path | None = None) -> None:
        """Under all names by which they may be looked up: the launch's, and the run's."""
        self._maps = []
        for job in dict.fromkeys(jobs):
            folder = run_folder(job, root=root)
            make_private(folder, inside=folder.parent)
            clear_old_runs(keep=job, root=root)
            with open(folder / f"rank-{rank}", "w+b") as file:
                file.truncate(_FOOTPRINT.size)
                self._maps.append(mmap(file.fileno(), _FOOTPRINT.size))
        self._born_mono_s = process_start_mono_s()

    def leave(self, step: int, world_size: int) -> None:
        global _last_step
        _last_step = step
        now_s = time.monotonic()
        for each in self._maps:
            _FOOTPRINT.pack_into(each, 0, now_s, self._born_mono_s, step, world_size)

    def close(self) -> None:
        for each in self._maps:
            each.close()


_STEP = struct.Struct("<qq")  # step, generation
_LENGTH = struct.Struct("<I")
_CAPACITY_BYTES = (8192, 256, 4096, 4096)
"""For each of a rank's generators."""
*_PARTS, _SLOT_BYTES = accumulate((_LENGTH.size + size for size in _CAPACITY_BYTES), initial=_STEP.size)
_NO_STEP = -1

Generators = tuple[bytes, bytes, bytes, bytes]
"""The random number generators of a process (`strata.training.rng.Taken`)."""


class GeneratorTrace:
    """This rank's random number generators after its last two steps, where they survive the rank.

    The steps take turns in two places. A step's number is removed before its place is written to, and written last: a process that
    is killed meanwhile leaves the step before it.
    """

    def __init__(self, job: str, *, rank: int, generation: int, root: Path | None = None) -> None:
        folder = run_folder(job, root=root)
        make_private(folder, inside=folder.parent)
        self._generation = generation
        self._held: list[Generators] = [(b"", b"", b"", b"")] * 2
        self._steps = [_NO_STEP, _NO_STEP]
        with open(folder / f"generators-{rank}", "w+b") as file:
            file.truncate(2 * _SLOT_BYTES)
            self._map = mmap(file.fileno(), 2 * _SLOT_BYTES)

    def leave(self, step: int, taken: Generators) -> None:
        place = step % 2
        held, start = self._held[place], place * _SLOT_BYTES
        if self._steps[place] == step and held == taken:
            return
        _STEP.pack_into(self._map, start, _NO_STEP, self._generation)
        for part, old, at in zip(taken, held, _PARTS, strict=True):
            if part is not old:
                _LENGTH.pack_into(self._map, start + at, len(part))
                at += start + _LENGTH.size
                self._map[at : at + len(part)] = part
        _STEP.pack_into(self._map, start, step, self._generation)
        self._held[place], self._steps[place] = taken, step

    def close(self) -> None:
        self._map.close()


def generators(job: str, *, step: int, generation: int, root: Path | None = None) -> dict[int, Generators]:
    """By rank, the generators that the ranks of a generation had on this machine after a step."""
    found = {}
    with suppress(OSError):
        for path in run_folder(job, root=root).glob("generators-*"):
            data = path.read_bytes()
            start = step % 2 * _SLOT_BYTES
            places = [start + at + _LENGTH.size for at in _PARTS]
            if len(data) != 2 * _SLOT_BYTES or _STEP.unpack_from(data, start) != (step, generation):
                continue
            parts = [data[at : at + _LENGTH.unpack_from(data, at - _LENGTH.size)[0]] for at in places]
            found[int(path.name.removeprefix("generators-"))] = (parts[0], parts[1], parts[2], parts[3])
    return found


def footprints(job: str, *, root: Path | None = None) -> list[Footprint]:
    """The last step of every rank that this run has, or had, on this machine."""
    return _footprints_in(run_folder(job, root=root))


def _footprints_in(folder: Path) -> list[Footprint]:
    found = []
    with suppress(OSError):
        for path in folder.glob("rank-*"):
            data = path.read_bytes()
            if len(data) == _FOOTPRINT.size:
                footprint = Footprint(*_FOOTPRINT.unpack(data))
                if footprint.mono_s:
                    found.append(footprint)
    return found


def last_footprint(job: str, *, root: Path | None = None) -> Footprint | None:
    """The newest step any rank of this run made on this machine."""
    return max(footprints(job, root=root), key=lambda footprint: footprint.mono_s, default=None)


def note_saved(job: str, *, root: Path | None = None) -> None:
    """From now on a restart that finds no state has lost one."""
    with suppress(OSError):
        (run_folder(job, root=root) / "saved").touch()


def was_saved(job: str, *, root: Path | None = None) -> bool:
    """Whether this run had saved anything on this machine."""
    return (run_folder(job, root=root) / "saved").exists()


def note_rendezvous(job: str, began_mono_s: float, ended_mono_s: float) -> None:
    """The agent tells its workers how long they took to find each other."""
    folder = run_folder(job)
    with suppress(OSError):
        make_private(folder, inside=folder.parent)
        write_file(folder / "rendezvous", json.dumps([began_mono_s, ended_mono_s]), durable=False)
    clear_old_runs(keep=job)


def _read_rendezvous(folder: Path) -> tuple[float, float] | None:
    try:
        began, ended = json.loads((folder / "rendezvous").read_text())
        return float(began), float(ended)
    except (OSError, ValueError, TypeError):
        return None


def forget_rendezvous(job: str) -> None:
    """The agent's run has ended; the timestamps of its workers are theirs to remove."""
    folder = run_folder(job)
    with suppress(OSError):
        for name in ("rendezvous", NOTED, VERIFIED_MODULES):
            (folder / name).unlink(missing_ok=True)
    remove_empty(folder)


def process_start_mono_s() -> float:
    """When this process began, on the monotonic clock."""
    try:
        return this_process().started_ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.monotonic()


_last_step: int | None = None


def last_step_here() -> int | None:
    """The newest step that this very process has made."""
    return _last_step


@dataclass(slots=True)
class Tracer:
    """Collects the timestamps of one recovery. `mark` them in order; `finish` adds them up."""

    job: str
    before: Footprint | None
    timestamps: dict[str, float] = field(default_factory=dict)
    is_recent: bool = True

    @classmethod
    def begin(cls, job: str, *, root: Path | None = None) -> Tracer:
        return cls(
            job=job, before=last_footprint(job, root=root), timestamps={"spawned": process_start_mono_s()}
        )

    @classmethod
    def begin_again(cls, job: str, *, noticed_s: float, left_s: float, root: Path | None = None) -> Tracer:
        """In a process that has survived: when it noticed that its generation was over, and when it had left it."""
        return cls(
            job=job, before=last_footprint(job, root=root), timestamps={"noticed": noticed_s, "left": left_s}
        )

    def find_before(self, job: str, *, root: Path | None, within_s: float) -> bool:
        """Look for the last step under the run's own name, which outlives its launches; whether that changed anything. One
        that was made long ago was resumed from, not recovered: it says how far the run had come, and nothing about time."""
        newest = max(
            (f for f in (self.before, last_footprint(job, root=root)) if f is not None),
            key=lambda f: f.mono_s,
            default=None,
        )
        changed, self.before = newest != self.before, newest
        self.is_recent = newest is not None and 0.0 <= time.monotonic() - newest.mono_s <= within_s
        return changed and self.is_recent

    def mark(self, name: str) -> None:
        self.timestamps.setdefault(name, time.monotonic())

    def phases(self) -> dict[str, float]:
        """Seconds by phase, as far as they are known."""
        m = self.timestamps
        if "noticed" in m:
            return self._phases_of_survivor()
        spawned = m["spawned"]
        ready = m.get("ready", m.get("joined", spawned))
        joined = m.get("joined", ready)
        loaded = m.get("loaded", joined)
        phases = {
            "spawn": ready - spawned,
            "rendezvous": joined - ready,
            "load": loaded - joined,
            "first_step": m.get("stepped", loaded) - loaded,
        }
        if self.before is not None and self.is_recent:
            phases["detect"] = spawned - self.before.mono_s
            met = _read_rendezvous(run_folder(os.environ.get("TORCHELASTIC_RUN_ID", self.job)))
            if met is not None and self.before.mono_s <= met[0] <= met[1] <= spawned:
                phases["detect"] = met[0] - self.before.mono_s
                phases["rendezvous"] += met[1] - met[0]
                phases["spawn"] += spawned - met[1]
        return {name: max(0.0, phases[name]) for name in PHASES if name in phases}

    def _phases_of_survivor(self) -> dict[str, float]:
        m = self.timestamps
        joined = m.get("joined", m["left"])
        loaded = m.get("loaded", joined)
        phases = {
            "abort": m["left"] - m["noticed"],
            "regroup": joined - m["left"],
            "load": loaded - joined,
            "first_step": m.get("stepped", loaded) - loaded,
        }
        if self.before is not None and self.is_recent:
            phases["detect"] = m["noticed"] - self.before.mono_s
        return {name: max(0.0, phases[name]) for name in PHASES if name in phases}
