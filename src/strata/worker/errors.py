"""What can go wrong between a worker and its coordinator, and whose turn it is."""

from __future__ import annotations

from typing import Any, cast

import grpc
import grpc.aio

from strata.errors import StrataError
from strata.leader import LEADER_METADATA

NO_RESPONSE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # By a coordinator that is stopping; a call cancelled here raises otherwise.
)


class CoordinatorUnavailable(StrataError):
    """No coordinator answers. Training may continue; what was acknowledged is safe."""

    code = "unavailable"

    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"The coordinator at {address} does not answer: {why}.",
            hint="Check that `strata serve` runs there, that COORDINATOR_ADDR is right and that the gRPC port "
            "(50051) is open.",
        )
        self.address = address
        self.why = why
        self.leader = ""
        """Who leads, where a standby has said so."""


class NoLeader(CoordinatorUnavailable):
    """None of the addresses given leads; `report` has what each of them said."""

    def __init__(self, address: str, report: str) -> None:
        super().__init__(address, report)
        self.message = f"None of the coordinators leads: {report}."
        self.hint = (
            "Check that `strata serve` runs at one of them, with a journal it can write to, and that COORDINATOR_ADDR "
            "names them all."
        )


class CoordinatorStorageFull(CoordinatorUnavailable):
    """It answers, and can record nothing until there is space on its disk. Worth waiting for, as for one that is away."""

    def __init__(self, address: str, why: str, *, hint: str) -> None:
        super().__init__(address, why)
        self.message, self.hint = why, hint


class CoordinatorRefused(StrataError):
    """The coordinator understood and said no; `reason_code` is its stable code."""

    code = "refused"

    def __init__(self, reason_code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason_code = reason_code


class StaleWorker(CoordinatorRefused):
    """This incarnation is over: nothing it says takes effect until it registers again.

    `cause` says why: `superseded` and `run_generation` mean that another process has taken its place, and that this one
    should stop; after `failed` and `unknown` it may register again; `generation` only asks to take part in the present one.
    """

    def __init__(self, reason_code: str, message: str, *, hint: str = "", cause: str = "") -> None:
        super().__init__(reason_code, message, hint=hint)
        self.cause = cause

    @property
    def superseded(self) -> bool:
        return self.cause in ("superseded", "run_generation")


class BarrierBroken(CoordinatorRefused):
    """The barrier ended without releasing anyone. `missing` names who did not come."""

    def __init__(self, message: str, *, missing: tuple[str, ...]) -> None:
        super().__init__(
            "barrier_broken",
            message,
            hint="Check the missing workers' logs, then wait at the barrier again.",
        )
        self.missing = missing


class SessionClosed(StrataError):
    """The call came after `close`, or was cut off by it."""

    code = "session_closed"

    def __init__(self, address: str) -> None:
        super().__init__(
            f"The connection to the coordinator at {address} was closed by this process.",
            hint="Create another TrainingOrchestrator.",
        )


class NotRegistered(StrataError):
    """The call needs a registered worker."""

    code = "not_registered"

    def __init__(self) -> None:
        super().__init__("This process has not registered a worker.", hint="Call register_worker(...) first.")


def from_rpc(error: grpc.aio.AioRpcError, address: str) -> StrataError:
    """A failed call as the error a caller can act on."""
    trailers: dict[str, str | bytes] = dict(cast(Any, error.trailing_metadata() or ()))
    text = error.details() or ""
    code = str(trailers.get("strata-code", ""))
    hint_bytes = trailers.get("strata-hint-bin", b"")
    hint = hint_bytes.decode() if isinstance(hint_bytes, bytes) else str(hint_bytes)
    if hint:
        text = text.removesuffix(hint).rstrip()
    if code == "barrier_broken":
        named = trailers.get("strata-missing-bin", b"")
        names = named.decode() if isinstance(named, bytes) else str(named)
        return BarrierBroken(text, missing=tuple(filter(None, names.split("\n"))))
    if error.code() is grpc.StatusCode.UNAVAILABLE:  # A standby's word, too.
        away = CoordinatorUnavailable(address, text.rstrip(".") or "unavailable")
        away.leader = str(trailers.get(LEADER_METADATA, ""))
        return away
    if code == "storage_full":
        return CoordinatorStorageFull(address, text, hint=hint)
    cause = str(trailers.get("strata-cause", ""))
    if code == "stale" or cause == "unknown":
        return StaleWorker(code, text, hint=hint, cause=cause)
    if code:
        return CoordinatorRefused(code, text, hint=hint)
    if error.code() in NO_RESPONSE:
        return CoordinatorUnavailable(address, text.rstrip(".") or error.code().name.lower())
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return CoordinatorRefused("forbidden", text, hint="Set STRATA_TOKEN.")
    if error.code() == grpc.StatusCode.INTERNAL and "too large" in text.lower():
        return CoordinatorRefused("invalid_argument", text)
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        what = f"The coordinator at {address} does not know this call: it is of an earlier version ({text.rstrip('.!')})."
        return CoordinatorRefused(
            "unimplemented", what, hint="Upgrade the coordinator first, then its workers."
        )
    return CoordinatorRefused(error.code().name.lower(), text)
