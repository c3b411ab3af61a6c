"""One table of rules decides what kind of failure it was; who failed first is never one that only lost a peer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.faults.failures import (
    ADVICE,
    CLASSES,
    EXIT_AGAIN,
    EXIT_HUNG,
    HANG,
    RULES,
    Failure,
    FailureClass,
    WorkerError,
    classify,
    fingerprint,
    first_failing,
)


def raised(type: str, message: str = "", *, rank: int = 0, at_s: float = 0.0) -> Failure:
    trace = f"Traceback (most recent call last):\n  File t.py\n{type}: {message}"
    error = WorkerError(type=type, message=message, where=("/x/t.py:3",), traceback=trace, at_s=at_s)
    return Failure(rank=rank, host="a", pid=100 + rank, exit_code=1, error=error, at_s=at_s)


def ended(code: int, *lines: str, rank: int = 0, at_s: float = 0.0) -> Failure:
    return Failure(rank=rank, host="a", pid=100 + rank, exit_code=code, last_lines=lines, at_s=at_s)


GLOO = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4455"


@pytest.mark.parametrize(
    ("expected", "failure"),
    [
        ("oom", replace(ended(-9), oom_killed=True)),
        ("oom", raised("MemoryError")),
        ("oom", raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")),
        ("oom", raised("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory")),
        ("oom", ended(-6, "terminate called after throwing an instance of 'std::bad_alloc'")),
        ("gpu", raised("RuntimeError", "CUDA error: an illegal memory access was encountered")),
        ("gpu", raised("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")),
        ("gpu", raised("DistBackendError", "NCCL error: unhandled cuda error, run with NCCL_DEBUG=INFO")),
        ("gpu", replace(ended(-6), device_faults=("NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off",))),
        ("user_error", raised("RuntimeError", "CUDA error: device-side assert triggered")),
        ("network", raised("RuntimeError", GLOO)),
        ("network", raised("DistBackendError", "NCCL communicator was aborted on rank 1")),
        ("network", raised("ConnectionRefusedError", "[Errno 111] Connection refused")),
        ("network", raised("gaierror", "[Errno -2] Name or service not known")),
        ("network", ended(-6, "[rank1]: ProcessGroupNCCL's watchdog got stuck", "NCCL timeout")),
        ("storage", raised("OSError", "[Errno 28] No space left on device: 'ck.pt'")),
        ("storage", raised("OSError", "[Errno 5] Input/output error")),
        ("storage", raised("SaveFailed", "the checkpoint of step 40 could not be written")),
        ("storage", raised("Unavailable", "s3://bucket does not answer")),
        ("preemption", ended(-15)),
        ("preemption", ended(EXIT_AGAIN)),
        ("preemption", raised("KeyboardInterrupt")),
        ("hang", ended(EXIT_HUNG)),
        ("hang", raised(HANG, "has completed no step for 300 s while training; it is stuck itself")),
        ("hang", Failure(rank=1, replaced="it did not leave within 30 s")),
        ("node_lost", Failure(rank=1, lost="connection lost 0.5 s ago, not reconnected")),
        ("user_error", raised("ValueError", "no such shape")),
        ("user_error", raised("ModuleNotFoundError", "No module named 'einops'")),
        ("user_error", raised("FileNotFoundError", "[Errno 2] No such file or directory: 'x'")),
        ("user_error", raised("ValueError", "bucket size must be positive")),
        ("user_error", ended(2)),
        ("unknown", ended(-9)),
        ("unknown", ended(-11)),
        ("unknown", ended(3)),
        ("unknown", Failure()),
    ],
)
def test_the_same_evidence_is_always_called_the_same(expected: FailureClass, failure: Failure) -> None:
    assert classify(failure) == expected


def test_every_class_has_a_rule_and_a_next_step() -> None:
    assert {rule.failure_class for rule in RULES} == set(CLASSES) == set(ADVICE)
    assert classify(None) == "unknown"


@pytest.mark.parametrize(
    ("first", "failures"),
    [
        (1, [raised("RuntimeError", GLOO, rank=0, at_s=1.0), ended(-9, rank=1, at_s=1.1)]),
        (1, [raised("RuntimeError", GLOO, rank=0, at_s=1.0), raised("ValueError", rank=1, at_s=2.0)]),
        (2, [raised("ValueError", rank=1, at_s=2.0), raised("KeyError", rank=2, at_s=1.0)]),
        (0, [ended(-15, rank=1, at_s=1.0), raised("ValueError", rank=0, at_s=1.2)]),
        (1, [ended(-6, "NCCL watchdog timeout", rank=0, at_s=1.0), ended(3, rank=1, at_s=1.1)]),
        (1, [Failure(rank=0, lost="silent", at_s=0.0), ended(-11, rank=1, at_s=1.0)]),
        (1, [raised(HANG, "it waits for other ranks", rank=0), raised(HANG, "it is stuck itself", rank=1, at_s=9.0)]),
        (0, [raised("RuntimeError", GLOO, rank=1, at_s=2.0), raised("RuntimeError", GLOO, rank=0, at_s=1.0)]),
        (0, [raised("TimeoutError", "timed out", rank=0, at_s=1.0),
             replace(raised("RuntimeError", GLOO, rank=1, at_s=1.1), exit_code=-15)]),
        (1, [ended(-15, rank=1, at_s=2.0), raised("RuntimeError", GLOO, rank=0, at_s=1.0)]),
        (1, [Failure(rank=0, left="training ended"), Failure(rank=1, lost="silent", at_s=5.0)]),
    ],
)  # fmt: skip
def test_who_only_lost_a_peer_or_was_asked_to_leave_never_failed_first(
    first: int, failures: list[Failure]
) -> None:
    for order in (failures, failures[::-1]):
        found = first_failing(order)
        assert found is not None
        assert found.rank == first
    assert first_failing([]) is None


def test_a_fingerprint_is_the_same_in_every_run() -> None:
    assert fingerprint(raised("ValueError", "x", rank=3)) == "user_error/ValueError/t.py:3"
    assert fingerprint(ended(-11, rank=5)) == fingerprint(ended(-11)) == "unknown/SIGSEGV"
    assert fingerprint(ended(3)) == "unknown/status-3"
    assert fingerprint(None) == "unknown"


def test_a_sentence_names_the_rank_and_how_it_ended() -> None:
    assert str(ended(-9, rank=3)) == "rank 3 (a, pid 103) was killed by SIGKILL"
    assert str(replace(ended(-9), oom_killed=True, gpu="1")).endswith(
        "(a, pid 100, GPU 1) was killed by the kernel because memory ran out (SIGKILL)"
    )
    assert "failed: ValueError: no" in str(raised("ValueError", "no"))
    assert str(ended(3, "usage: --x", "")).endswith("ended with status 3: usage: --x")


def test_a_copy_that_changes_by_itself_blames_the_machine_but_only_where_it_is_known_whose() -> None:
    def ended(type_: str) -> Failure:
        error = WorkerError(type=type_, message="The state of rank 2 was corrupted 3 times", traceback="…")
        return Failure(exit_code=1, error=error)

    assert classify(ended("ReplicaDamaged")) == "gpu"
    assert classify(ended("ReplicasDiffer")) == "unknown"
