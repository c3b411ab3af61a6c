"""Cases run in a child process with limits; the parent watches it and says what became of it.

The case under way stands in shared memory, so that it is known even if the process is killed by it.
"""

from __future__ import annotations

import base64
import faulthandler
import gc
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

CASE_S = 5.0
"""How much processor time one case may take: a process that waits for a processor has done nothing wrong."""
WAIT_S = 30.0
"""How long one case may take, with what it waits for."""
STUCK_S = 60.0
"""How long the process may be busy with one case that no signal ends."""
MEMORY_BYTES = 1 << 30
"""Beyond what is loaded before the first case."""
GROWTH_BYTES = 200 << 20
"""How much more memory may be in use at any time, after the first thousand cases."""
FAILURES_REPORTED = 20
SCRATCH = "STRATA_FUZZ_SCRATCH"
"""Names the folder in memory that a child may use."""
SETTING_UP = 2**64 - 1
"""In place of a case's number: importing takes as long as it takes."""
NO_TARGET = 3
"""Exit status of a child whose target could not be set up."""
CORPUS = Path(__file__).parent / "corpus"
_HEADER = struct.Struct("<QQQQ")
_PLACE_BYTES = 4 << 20


class Target(Protocol):
    """Something that reads bytes. `errors` is what it promises to raise for wrong ones."""

    errors: tuple[type[BaseException], ...]
    renewed_every: int
    """Cases after which its state is made anew; 0: it has none. To see a case again, start at the renewal before it."""

    def renew(self) -> None: ...

    def make(self, chance: Random) -> bytes: ...

    def run(self, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    case: int
    what: str
    data: bytes


@dataclass(slots=True, kw_only=True)
class Result:
    target: str
    cases: int
    took_s: float
    accepted: int
    """Cases that were read as if nothing were wrong: too few, and only the first check is tested."""
    growth_bytes: int
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        rate = self.cases / self.took_s if self.took_s else 0.0
        lines = [
            f"{self.target}: {self.cases:,} cases in {self.took_s:.1f} s ({rate:,.0f}/s), {self.accepted:,} accepted, "
            f"{self.growth_bytes / 1e6:.0f} MB more memory at most, {len(self.failures)} failures"
        ]
        for failure in self.failures:
            shown = base64.b64encode(failure.data[:2000]).decode()
            lines.append(f"--- case {failure.case}: {failure.what}\n    {len(failure.data)} bytes: {shown}")
        return "\n".join(lines)


class Hang(BaseException):
    """A case took too long."""


def fuzz(name: str, *, seed: int, first: int, cases: int, save: Path | None = None) -> Result:
    """Run these cases in a child; whatever becomes of it is in the result."""
    with tempfile.TemporaryDirectory(prefix="strata-fuzz-", dir="/dev/shm") as scratch:
        return _fuzz(name, seed, first, cases, save, scratch)


def _fuzz(name: str, seed: int, first: int, cases: int, save: Path | None, scratch: str) -> Result:
    place = mmap.mmap(-1, _PLACE_BYTES)
    started_s = time.monotonic()
    done, failures, accepted, growth_bytes = first, list[Failure](), 0, 0
    while done < first + cases:
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        _HEADER.pack_into(place, 0, SETTING_UP, 0, 0, 0)
        child = os.fork()
        if not child:
            os.close(read_end)
            os.environ[SCRATCH] = scratch
            _child(name, seed, done, first + cases, place, write_end)
        os.close(write_end)
        status = _watch(child, place)
        with os.fdopen(read_end, "rb") as pipe:
            said = pipe.read()
        case, size_bytes, child_accepted, child_growth = _HEADER.unpack_from(place)
        accepted += child_accepted
        growth_bytes = max(growth_bytes, child_growth)
        failures += _decode_failures(said)
        if status == 0:
            break
        if status == NO_TARGET:
            raise RuntimeError(f"the target '{name}' could not be set up")
        data = bytes(place[_HEADER.size : _HEADER.size + size_bytes])
        failures.append(Failure(case=case, what=f"the process ended with {status}", data=data))
        done = case + 1
        if len(failures) > FAILURES_REPORTED:
            break
    if save is not None:
        for failure in failures:
            (save / f"{name}-{seed}-{failure.case}").write_bytes(failure.data)
    return Result(
        target=name,
        cases=cases,
        took_s=time.monotonic() - started_s,
        accepted=accepted,
        growth_bytes=growth_bytes,
        failures=failures,
    )


def _watch(child: int, place: mmap.mmap) -> int:
    """Until the child ends: 0, or what it ended with. One that no longer moves is killed."""
    moved_s, last = time.monotonic(), -1
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        case = _HEADER.unpack_from(place)[0]
        if case != last:
            moved_s, last = time.monotonic(), case
        elif case != SETTING_UP and time.monotonic() - moved_s > STUCK_S:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)


def _child(name: str, seed: int, first: int, last: int, place: mmap.mmap, write_end: int) -> None:
    status = NO_TARGET
    try:
        from tests.fuzz.targets import make_target

        faulthandler.enable()
        target = make_target(name)
        target.renew()
        kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
        status = 1
        failures = _run(target, seed, first, last, place, kept)
        os.write(write_end, _encode_failures(failures)[:60_000])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(
    target: Target, seed: int, first: int, last: int, place: mmap.mmap, kept: Sequence[bytes]
) -> list[Failure]:
    failures: dict[str, Failure] = {}
    signal.signal(signal.SIGPROF, _too_long)
    signal.signal(signal.SIGALRM, _too_long)
    size_bytes = _mapped_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, size_bytes))
    accepted, base_bytes, growth_bytes = 0, 0, 0
    for case in range(first, last):
        if target.renewed_every and case % target.renewed_every == 0:
            target.renew()
        data = kept[case] if case < len(kept) else target.make(Random(seed << 40 | case))
        data = data[: _PLACE_BYTES - _HEADER.size]
        place[_HEADER.size : _HEADER.size + len(data)] = data
        _HEADER.pack_into(place, 0, case, len(data), accepted, growth_bytes)
        signal.setitimer(signal.ITIMER_PROF, CASE_S)
        signal.setitimer(signal.ITIMER_REAL, WAIT_S)
        try:
            target.run(data)
            accepted += 1
        except target.errors:
            pass
        except (Exception, Hang) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}"
            text = "".join(traceback.format_exception(error, limit=-8))[-3000:]
            failures.setdefault(kind, Failure(case=case, what=f"{kind}\n{text}", data=data))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        if case % 500 == 0:
            now_bytes = _resident_bytes()
            if case < first + 1000:
                base_bytes = max(base_bytes, now_bytes)
            elif now_bytes - base_bytes > GROWTH_BYTES:
                gc.collect()
                now_bytes = _resident_bytes()
                if now_bytes - base_bytes > GROWTH_BYTES:
                    what = f"memory grew by {(now_bytes - base_bytes) / 1e6:.0f} MB"
                    failures.setdefault("memory", Failure(case=case, what=what, data=data))
            growth_bytes = max(growth_bytes, now_bytes - base_bytes)
    _HEADER.pack_into(place, 0, last, 0, accepted, growth_bytes)
    return list(failures.values())[:FAILURES_REPORTED]


def _too_long(*_: object) -> None:
    raise Hang(f"longer than {CASE_S} s of processor time, or than {WAIT_S} s")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _encode_failures(failures: Sequence[Failure]) -> bytes:
    import msgspec

    return msgspec.msgpack.encode([(f.case, f.what, f.data[:2000]) for f in failures])


def _decode_failures(said: bytes) -> list[Failure]:
    import msgspec

    try:
        rows = msgspec.msgpack.decode(said, type=list[tuple[int, str, bytes]])
    except msgspec.MsgspecError:
        return []
    return [Failure(case=case, what=what, data=data) for case, what, data in rows]
