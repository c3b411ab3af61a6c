"""Around every gRPC call: who may make it, and how every refusal looks.

A refusal is a status with a code for programs in `strata-code`, the next step in `strata-hint-bin`, and for a caller that
is stale in `strata-cause` why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import quote

import grpc
import grpc.aio

from strata.coordinator.auth.audit_log import AuditLog
from strata.coordinator.auth.gatekeeper import Connection, Gatekeeper, parse_subject
from strata.coordinator.auth.peers import Address, parse_grpc_peer
from strata.coordinator.auth.principals import Forbidden, Principal
from strata.coordinator.engine import InternalError, StorageFull, Unavailable
from strata.coordinator.leadership import Standby
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
    StorageFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    InternalError: grpc.StatusCode.INTERNAL,
}
_FORBIDDEN = {401: grpc.StatusCode.UNAUTHENTICATED, 429: grpc.StatusCode.RESOURCE_EXHAUSTED}
WILDCARDS = ("0.0.0.0", "::")
HELLO_TIMEOUT_S = 10.0
_END: object = grpc.aio.EOF  # type: ignore[attr-defined]


async def refuse(context: Context, error: StrataError) -> NoReturn:
    if isinstance(error, Forbidden):
        status = _FORBIDDEN.get(error.status, grpc.StatusCode.PERMISSION_DENIED)
    else:
        status = _STATUSES[next((kind for kind in type(error).__mro__ if kind in _STATUSES), Stale)]
    trailers: tuple[tuple[str, str | bytes], ...] = (
        ("strata-code", error.code),
        ("strata-hint-bin", error.hint.encode()),
    )
    if isinstance(error, Standby):
        trailers += (("strata-role", "standby"),)
        if error.leader is not None:
            trailers += (("strata-leader", error.leader.grpc),)
    if isinstance(error, Refused) and error.cause:
        trailers += (("strata-cause", error.cause),)
    await context.abort(status, str(error), trailers)
    raise AssertionError("abort always raises")


def unreadable(message: Malformed) -> InvalidArgument:
    return InvalidArgument(
        "message",
        f"cannot be read: {message.why}.",
        hint=message.hint,
    )


async def next_message(context: Context) -> Any:
    """The next message of a stream; None at its end."""
    message = await context.read()
    if isinstance(message, Malformed):
        raise unreadable(message)
    return None if message is _END else message


async def read_hello(context: Context, *, of: str, named: str, also: str = "") -> Any:
    """The hello of a stream, which says whose it is; `also` is another body that does."""
    hint = f"Send {named} first."
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await next_message(context)
    except TimeoutError:
        raise InvalidArgument("hello", "is missing.", hint=hint) from None
    body = first.WhichOneof("body") if first is not None else None
    if body is None or body not in ("hello", also):
        raise InvalidArgument("hello", f"must be the first message of {of}.", hint=hint)
    return getattr(first, body)


def own_key(key: str, caller: Principal) -> str:
    """The values of a caller that is bound to a job are that job's own, whatever the job is called."""
    return key if caller.job is None else f"job/{quote(caller.job, safe='')}/{key}"


def barrier_text(request: pb.WaitBarrierRequest, reason: str) -> str:
    return f"Barrier '{request.barrier_id}' at step {request.step} was broken: {reason}."


class GrpcAccess:
    """Who makes a gRPC call. What one may do in which job is for each method to say."""

    def __init__(
        self, gatekeeper: Gatekeeper, audit_log: AuditLog, *, ours: Callable[[], Address], mutual_tls: bool
    ) -> None:
        """`ours` is the address the server listens on, once it does; `mutual_tls`: whether clients have certificates."""
        self._gatekeeper = gatekeeper
        self._audit_log = audit_log
        self._ours = ours
        self._mutual_tls = mutual_tls

    def identify(self, context: Context) -> Principal:
        authorization = next(
            (str(value) for key, value in context.invocation_metadata() or () if key == "authorization"), ""
        )
        principal = self._gatekeeper.identify(self._connection(context), authorization=authorization)
        principal.require("worker")
        return principal

    def audit(
        self,
        context: Context,
        principal: Principal | None,
        action: str,
        *,
        target: str = "",
        refusal: str = "",
    ) -> None:
        self._audit_log.add(
            who=principal.name if principal is not None else "unknown",
            role=principal.role if principal is not None else "",
            action=action,
            target=target,
            outcome="refused" if refusal else "allowed",
            reason=refusal,
            client=self._connection(context).client,
        )

    def _connection(self, context: Context) -> Connection:
        peer = parse_grpc_peer(context.peer())
        ours = self._ours()
        if peer is not None and ours[0] in WILDCARDS:
            ours = ("::1" if ":" in peer[0] else "127.0.0.1", ours[1])
        connection = Connection(peer, ours, self._gatekeeper.owners)
        if self._mutual_tls:
            subject = next(iter(context.auth_context().get("x509_subject", ())), None)
            if subject is not None:
                connection.certificate = parse_subject(subject.decode(errors="replace"))
        return connection
