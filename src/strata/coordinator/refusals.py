"""Refusals as gRPC statuses: a code for programs in `strata-code`, the next step in `strata-hint-bin`."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from strata.coordinator.engine import InternalError, Unavailable
from strata.core.messages import Conflict, InvalidArgument, Overloaded, Stale, Unknown
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
    status = _STATUSES.get(type(error), grpc.StatusCode.FAILED_PRECONDITION)
    trailers = (("strata-code", error.code), ("strata-hint-bin", error.hint.encode()))
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
