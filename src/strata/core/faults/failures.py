"""What ended a worker: the evidence, and by one table of rules what kind of failure it was.

`Failure` holds what is known of one worker's end and concludes nothing. `classify` is the table `RULES`, read from the top: the first
rule that holds decides, so the same evidence is always called the same. `first_failing` says who failed by itself: a rank that only
lost its peers, or that was asked to leave after another had failed, never did. `fingerprint` names a failure in a way that
is the same in every run. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from strata.core.text import counted

FailureClass = Literal[
    "user_error", "oom", "gpu", "network", "storage", "preemption", "hang", "node_lost", "unknown"
]
CLASSES: tuple[FailureClass, ...] = get_args(FailureClass)

EXIT_AGAIN = 75
"""Exit status of a process that was asked to leave, has saved, and should be started again (EX_TEMPFAIL)."""
EXIT_HUNG = 86
"""Exit status of a process that its own watchdog has ended."""
HANG = "Hang"
"""The type of the error that a watchdog reports."""
SIGABRT, SIGKILL, SIGTERM = 6, 9, 15
"""On every platform that workers run on."""
_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
LINES_KEPT = 20

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_PEERS = re.compile(
    r"connection (closed|reset|refused|was broken)|broken pipe|gloo|nccl|socket ?timeout|timed out"
    r"|connect(ed)? to|process group|peer",
    re.IGNORECASE,
)
_PEER_TYPES = frozenset(
    {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError"}
    | {"ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError"}
    | {"PeerFailed"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """The error that ended a worker, as it reported it."""

    type: str
    message: str
    where: tuple[str, ...] = ()
    """`file:line` of each of the program's frames; the last is where it was raised."""
    step: int | None = None
    """The newest step this process had made or restored; None where there is no job, or none was made."""
    traceback: str = ""
    at_s: float = 0.0

    @property
    def place(self) -> str:
        return self.where[-1] if self.where else ""

    @property
    def is_about_peers(self) -> bool:
        """Whether it may be only the consequence of another worker's end."""
        if self.type in _PEER_TYPES:
            return True
        if self.type == HANG:
            return "waits for other ranks" in self.message
        return self.type in ("RuntimeError", "TimeoutError", "OSError") and bool(_PEERS.search(self.message))

    def is_like(self, other: WorkerError) -> bool:
        """The same error at the same place; numbers in its message (addresses, pids) differ from time to time."""
        return (self.type, self.where, _text(self.message)) == (other.type, other.where, _text(other.message))

    def __str__(self) -> str:
        said = f"{self.type}: {self.message}" if self.message else self.type
        return f"{said} ({self.place})" if self.place else said

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> WorkerError:
        """Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
        step = raw["step"]
        return cls(
            type=str(raw["type"]),
            message=str(raw["message"]),
            where=tuple(map(str, raw["where"])),
            step=None if step is None else int(step),
            traceback=str(raw["traceback"]),
            at_s=float(raw["at_s"]),
        )


def root_cause(errors: list[WorkerError]) -> WorkerError | None:
    """Of the errors of one attempt, the one to blame: the first that is not about another worker."""
    own = [error for error in errors if not error.is_about_peers]
    return min(own or errors, key=lambda error: error.at_s, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Everything known about how one worker ended."""

    rank: int | None = None
    host: str = ""
    pid: int = 0
    gpu: str = ""
    """Which of the machine's devices was its own; empty where there is none."""
    at_s: float = 0.0
    """When it was noticed, or raised where that is known; wall-clock time of its machine."""
    exit_code: int | None = None
    """Negative: the signal that ended it. None: its end was not seen."""
    error: WorkerError | None = None
    """What it reported itself."""
    oom_killed: bool = False
    """The kernel killed it, or a process beside it at that moment, because memory ran out."""
    device_faults: tuple[str, ...] = ()
    """Lines of the kernel's log about a GPU (Xid, ECC), since the attempt began."""
    last_lines: tuple[str, ...] = ()
    """Of its standard error, the newest last."""
    replaced: str = ""
    """Why the agent ended it itself: it did not leave a process group that was over."""
    lost: str = ""
    """Why the coordinator takes it for lost."""
    left: str = ""
    """Why it left in good order."""

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or empty."""
        return signal_name(-self.exit_code) if self.exit_code is not None and self.exit_code < 0 else ""

    @property
    def text(self) -> str:
        """All that was said, by itself and about it."""
        error = self.error
        said = f"{error.type}: {error.message}" if error is not None else ""
        # What a process printed matters where it died without a report: a library that aborts says why there alone.
        printed = "\n".join(self.last_lines) if error is None else ""
        return "\n".join(filter(None, (said, printed)))

    @property
    def is_about_peers(self) -> bool:
        """Whether it may be only the consequence of another worker's end."""
        if self.error is not None:
            return self.error.is_about_peers and classify(self) in ("network", "hang")
        return self.exit_code == -SIGABRT and classify(self) == "network"

    @property
    def is_own(self) -> bool:
        """Whether this worker failed by itself. SIGTERM is what agents send to those that are left."""
        return not self.is_about_peers and self.exit_code != -SIGTERM and not self.left

    @property
    def hangs(self) -> bool:
        """Whether its process is still there, and makes no step."""
        return self.exit_code is None and not self.lost and self.error is not None and self.error.type == HANG

    @property
    def who(self) -> str:
        rank = f"rank {self.rank}" if self.rank is not None else "a worker"
        where = [self.host] if self.host else []
        where += [f"pid {self.pid}"] if self.pid else []
        where += [f"GPU {self.gpu}"] if self.gpu else []
        return f"{rank} ({', '.join(where)})" if where else rank

    @property
    def what(self) -> str:
        """How it ended: 'was killed by SIGKILL'."""
        if self.exit_code is not None and self.exit_code < 0:
            if self.oom_killed and self.exit_code == -SIGKILL:
                return f"was killed by the kernel because memory ran out ({self.signal})"
            return f"was killed by {self.signal}"
        if self.error is not None and self.error.type == HANG:
            return f"hung: {self.error.message}"
        if self.replaced:
            return f"was replaced: {self.replaced}"
        if self.error is not None and (self.error.traceback or self.exit_code is None):
            return f"failed: {self.error}"
        if self.exit_code == EXIT_AGAIN:
            return "was asked to leave and asks to be started again (status 75)"
        if self.exit_code is not None:
            last = next((line.strip() for line in reversed(self.last_lines) if line.strip()), "")
            return f"ended with status {self.exit_code}" + (f": {last}" if last else "")
        if self.left:
            return f"left: {self.left}"
        return f"was lost: {self.lost}" if self.lost else "exited for an unknown reason"

    def __str__(self) -> str:
        return f"{self.who} {self.what}"

    def is_like(self, other: Failure) -> bool:
        """The same failure once more."""
        if fingerprint(self) != fingerprint(other):
            return False
        return self.error is None or other.error is None or self.error.is_like(other.error)


# --- classes ----------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    failure_class: FailureClass
    evidence: str
    holds: Callable[[Failure], bool]


def _says(pattern: str) -> Callable[[Failure], bool]:
    found = re.compile(pattern, re.IGNORECASE)
    return lambda failure: bool(found.search(failure.text))


def _raised(*types: str) -> Callable[[Failure], bool]:
    return lambda failure: failure.error is not None and failure.error.type in types


RULES: tuple[Rule, ...] = (
    Rule("oom", "SIGKILL while the kernel's OOM killer was active",
         lambda f: f.oom_killed and f.exit_code == -SIGKILL),
    Rule("oom", "an out-of-memory error of the GPU's or the host's allocator",
         _raised("MemoryError", "OutOfMemoryError", "_ArrayMemoryError", "MemoryLimitExceeded")),
    Rule("oom", "a message about failed memory allocation",
         _says(r"out of memory|can't allocate memory|cannot allocate memory|std::bad_alloc|insufficient shared memory")),
    Rule("user_error", "a device-side assert: an index or label out of range",
         _says(r"device-side assert")),
    Rule("gpu", "the kernel log reports a fault of the device (Xid, ECC)", lambda f: bool(f.device_faults)),
    Rule("gpu", "an error from CUDA or one of its libraries",
         _says(r"\bcuda (driver )?error|unhandled cuda error|cudaerror|cublas_status|cudnn_status|cusolver_status"
               r"|uncorrectable ecc|illegal memory access|unspecified launch failure|fallen off the bus|\bnvrm\b.*xid")),
    Rule("gpu", "its copy of the state was corrupted repeatedly", _raised("ReplicaDamaged")),
    Rule("unknown", "copies of the state differ, without a majority", _raised("ReplicasDiffer")),
    Rule("hang", "its watchdog saw no step in time, or it did not leave an aborted process group",
         lambda f: f.exit_code == EXIT_HUNG or bool(f.replaced) or _raised(HANG)(f)),
    Rule("storage", "an error of a store, or a checkpoint that could not be written or read",
         _raised("NoSpace", "DeviceError", "AccessDenied", "NoCredentials", "Unavailable", "Truncated", "StoreError",
                 "SaveFailed", "FinalSaveFailed", "CheckpointError", "CheckpointSaveError", "CheckpointLoadError",
                 "LoadFailed", "Damaged", "SourceUnreadable")),
    Rule("storage", "a message about a full, failing or missing disk or bucket",
         _says(r"no space left|disk quota|\bi/o error|input/output error|read-only file system|stale file handle"
               r"|s3://|gs://|botocore|obstore")),
    Rule("network", "a failed collective, or a connection that failed or was lost",
         lambda f: (f.error is not None and f.error.is_about_peers)
         or _raised("gaierror", "timeout", "TimeoutError", "SSLError", "URLError", "ConnectTimeout", "ReadTimeout",
                    "RendezvousConnectionError", "RendezvousTimeoutError", "CoordinatorUnavailable")(f)),
    Rule("network", "a message from NCCL, gloo or a socket, and no error reported by the process",
         lambda f: f.error is None and f.exit_code is not None and _says(
             r"nccl|gloo|connection (closed|reset|refused)|network is unreachable|no route to host")(f)),
    Rule("preemption", "SIGTERM, or the exit status of a process that was asked to leave",
         lambda f: f.exit_code in (-SIGTERM, EXIT_AGAIN, 128 + SIGTERM) or bool(f.left)),
    Rule("preemption", "an interrupt (Ctrl-C)", _raised("KeyboardInterrupt", "SignalException")),
    Rule("user_error", "an error that the program raised", lambda f: f.error is not None and bool(f.error.traceback)),
    Rule("user_error", "a program that rejects its arguments or exits with a message (status 2, sys.exit)",
         lambda f: f.error is not None or f.exit_code == 2),
    Rule("node_lost", "its connection ended, and its exit was not observed",
         lambda f: f.exit_code is None and bool(f.lost)),
    Rule("unknown", "no evidence of a cause", lambda f: True),
)  # fmt: skip
"""From the top; the first that holds decides. Memory and devices before what they lead to, what a process was asked to do before what it
did, and the program's own errors before what is only missing."""


def rule_of(failure: Failure) -> Rule:
    return next(rule for rule in RULES if rule.holds(failure))


def classify(failure: Failure | None) -> FailureClass:
    return rule_of(failure).failure_class if failure is not None else "unknown"


def is_corrupting(failure: Failure) -> bool:
    """Whether its copy of the state changed by itself again and again, as the other ranks have seen."""
    return _raised("ReplicaDamaged")(failure)


def first_failing(failures: Sequence[Failure]) -> Failure | None:
    """Who failed first by itself; where none did, who was hit first.

    One that a signal killed is why others have failed, and never the reverse: it comes before errors, which may be late
    to say that they are about it.
    """
    own = [failure for failure in failures if failure.is_own]
    seen = [failure for failure in own if not (failure.exit_code is None and failure.lost)]

    def order(failure: Failure) -> tuple[bool, float]:
        code = failure.exit_code
        # One that had reported an error was only ended by its agent.
        killed = code is not None and code < 0 and code != -SIGABRT and failure.error is None
        return not killed, failure.at_s

    return min(seen or own or failures, key=order, default=None)


def fingerprint(failure: Failure | None) -> str:
    """'user_error/ValueError/train.py:41', 'unknown/SIGSEGV': the same for the same failure in every run."""
    if failure is None:
        return "unknown"
    error = failure.error
    parts: list[str] = [classify(failure)]
    if failure.signal:
        parts.append(failure.signal)
    elif error is not None:
        parts += [error.type, error.place.rpartition("/")[2]]
    elif failure.exit_code is not None:
        parts.append(f"status-{failure.exit_code}")
    return "/".join(filter(None, parts))


ADVICE: Mapping[FailureClass, str] = {
    "user_error": "Fix the program where the traceback points, then start it again: it continues from the newest checkpoint.",
    "oom": "Use a smaller batch or fewer loader workers, shard the model, or give the run more memory.",
    "gpu": "Check the machine's GPUs (`nvidia-smi -q -d ECC,ROW_REMAPPER`, `dmesg | grep Xid`); if it recurs: strata "
    "quarantine add HOST.",
    "network": "Check the errors of the other ranks, then the network between the machines: strata doctor.",
    "storage": "Free space, or check the address and credentials of the destination: strata doctor.",
    "preemption": "Nothing: the run continues when it is scheduled again.",
    "hang": "See in the stacks below what it waits for; `hang_timeout_s` limits how long it may wait.",
    "node_lost": "Check whether the machine is up. The run continues without it; it rejoins when its agent is started.",
    "unknown": "Check its last output: strata logs --level error. SIGKILL comes from outside: a person, a scheduler or the "
    "kernel (`dmesg`).",
}
"""What to do next, where the run's own words say no more."""


def signal_name(number: int) -> str:
    return _SIGNALS.get(number, f"signal {number}")


def lines(text: str) -> tuple[str, ...]:
    """The last lines of what a process printed."""
    return tuple(text.splitlines()[-LINES_KEPT:])


def others(failures: Sequence[Failure], first: Failure | None) -> str:
    """'; 3 other ranks were hit' for the end of a sentence, or nothing."""
    count = sum(failure is not first for failure in failures)
    return f"; {counted(count, 'other rank')} ended with it" if count else ""


def _text(message: str) -> str:
    return _NUMBERS.sub("#", message)
