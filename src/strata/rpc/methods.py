"""The service's methods as gRPC wants them, under every name they are served by; unreadable messages are handed on, not raised.

The wire has a version, the package: `strata.v1`. Within it fields and methods are only added, and what a peer does not know
it leaves out. Another `strata.vN` is answered with what is served here. `coordinator` is the name of version 0.1; it has the
same messages, and stays served for one release. There were other programs of that name, so what comes under it must fit
exactly: a field that is not in the message, or is of another type there, was meant as something else, and the call is refused
before anything is made of it.

gRPC's own way with bytes that are not the message they should be is a traceback and a status that blames the
server. Here such a message arrives as `Malformed`, and the method answers that the caller's bytes are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

import strata
from strata.rpc import coordinator_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
NAME: str = SERVICE.full_name
EARLIER_NAME = "coordinator.Coordinator"
EARLIER_METHODS = frozenset(
    {
        "RegisterWorker",
        "Heartbeat",
        "DeregisterWorker",
        "RegisterDataset",
        "ListDatasets",
        "GetDataShard",
        "WaitBarrier",
        "NotifyCheckpoint",
        "ReconcileCheckpoints",
        "GetLatestCheckpoint",
        "ReportRecovery",
        "ReadValue",
        "SwapValue",
        "Session",
    }
)
"""Of version 0.1. Its later ones are served as `strata.v1` alone."""
PROTO = "proto/strata/rpc/coordinator.proto"
_OTHER_VERSION = re.compile(r"/(strata\.v[0-9]+)\.Coordinator/")


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are not the message the method takes."""

    why: str
    hint: str = f"Send what {PROTO} describes; texts must be UTF-8."


def handlers(service: object) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
    """Every method of the contract, answered by the method of the same name on `service`."""
    names = [method.name for method in SERVICE.methods]
    return (
        _served_as(NAME, names, service, _reader),
        _served_as(EARLIER_NAME, [name for name in names if name in EARLIER_METHODS], service, _exact_reader),
        _OtherVersions(),
    )


def _served_as(
    name: str, methods: list[str], service: object, reader: Callable[[Any], Callable[[bytes], Any]]
) -> grpc.GenericRpcHandler[Any, Any]:
    table = {}
    for method in (SERVICE.methods_by_name[each] for each in methods):
        make = (
            grpc.stream_stream_rpc_method_handler
            if method.client_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        table[method.name] = make(
            getattr(service, method.name),
            request_deserializer=reader(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(name, table)


def _reader(kind: Any) -> Callable[[bytes], Any]:
    parse = kind.FromString

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return Malformed(str(error))

    return read


def _exact_reader(kind: Any) -> Callable[[bytes], Any]:
    """Of what comes under the earlier name: nothing may be left over that the message does not have."""
    parse = kind.FromString
    hint = f"Generate this client from {PROTO} and call strata.v1, or use Strata's own worker library."

    def read(data: bytes) -> Any:
        try:
            message = parse(data)
        except DecodeError as error:
            return Malformed(f"it is not a {kind.DESCRIPTOR.name} of Strata ({error})", hint)
        size_bytes = message.ByteSize()
        message.DiscardUnknownFields()
        if message.ByteSize() != size_bytes:
            what = (
                f"it has fields that a {kind.DESCRIPTOR.name} of Strata does not have, or has as another type"
            )
            return Malformed(f"{what}; they have another meaning here", hint)
        return message

    return read


class _OtherVersions(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Versions of the wire that this coordinator does not speak: which it does, and what to do."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any] | None:
        asked = _OTHER_VERSION.match(handler_call_details.method)
        if asked is None or asked[1] == pb.DESCRIPTOR.package:
            return None
        said = (
            f"This coordinator (Strata {strata.__version__}) speaks {pb.DESCRIPTOR.package}, not {asked[1]}."
        )
        hint = "Upgrade the coordinator first, then its clients."

        async def refuse(requests: object, context: Any) -> None:
            trailers = (("strata-code", "wire_version"), ("strata-hint-bin", hint.encode()))
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{said} {hint}", trailers)

        return grpc.stream_stream_rpc_method_handler(refuse)
