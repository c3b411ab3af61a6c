"""Refusals as gRPC statuses: a code for programs in `strata-code`, the next step in `strata-hint-bin`, and for a caller
that is stale in `strata-cause` why."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from strata.coordinator.engine import InternalError, Unavailable
from strata.core.messages import Conflict, InvalidArgument, Overloaded, Refused, Stale, Unknown
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.methods import Malformed

Context = grpc.aio.ServicerContext[Any, Any]

_STATUSES: dict[type[StrataError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    Unknown: grpc.StatusCode.NOT_FOUND,
    Conflict: grpc.StatusCode.ALREADY_EXISTS,
    Stale: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    InternalError: grpc.StatusCode.INTERNAL,
}


async def refuse(context: Context, error: StrataError) -> NoReturn:
    kinds = (kind for kind in type(error).__mro__ if kind in _STATUSES)
    status = _STATUSES[next(kinds, Stale)]
    trailers: tuple[tuple[str, str | bytes], ...] = (
        ("strata-code", error.code),
        ("strata-hint-bin", error.hint.encode()),
    )
    if isinstance(error, Refused) and error.cause:
        trailers += (("strata-cause", error.cause),)
    await context.abort(status, str(error), trailers)
    raise AssertionError("abort always raises")


def unreadable(message: Malformed) -> InvalidArgument:
    return InvalidArgument(
        "message",
        f"cannot be read: {message.why}.",
        hint="Send what proto/strata/rpc/coordinator.proto describes; texts must be UTF-8.",
    )


def barrier_text(request: pb.WaitBarrierRequest, reason: str) -> str:
    return f"Barrier '{request.barrier_id}' at step {request.step} was broken: {reason}."
