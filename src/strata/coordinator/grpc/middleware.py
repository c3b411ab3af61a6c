"""Around every gRPC call: who may make it, and how every refusal looks.

A refusal is a status with a code for programs in `strata-code`, the next step in `strata-hint-bin`, and for a caller that
is stale in `strata-cause` why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from strata.coordinator.auth import Forbidden, Gatekeeper
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


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses gRPC calls without a worker's token. Installed only when there are tokens."""

    def __init__(self, gatekeeper: Gatekeeper) -> None:
        self._gatekeeper = gatekeeper

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = cast("grpc.RpcMethodHandler[Any, Any] | None", await continuation(details))
        if handler is None:
            return handler  # type: ignore[return-value]  # gRPC answers that there is no such method.
        metadata = dict(details.invocation_metadata or ())
        try:
            self._gatekeeper.check_role(str(metadata.get("authorization", "")), "worker")
        except Forbidden as refusal:
            status = (
                grpc.StatusCode.UNAUTHENTICATED
                if refusal.status == 401
                else grpc.StatusCode.PERMISSION_DENIED
            )
            message = str(refusal)
            trailers = (("strata-code", refusal.code), ("strata-hint-bin", refusal.hint.encode()))

            async def deny(request: Any, context: Context) -> None:
                await context.abort(status, message, trailers)

            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(deny)
            return grpc.unary_unary_rpc_method_handler(deny)
        return handler
