"""The service's methods as gRPC wants them, with messages that cannot be read handed on instead of raised.

gRPC's own way with bytes that are not the message they should be is a traceback and a status that blames the
server. Here such a message arrives as `Malformed`, and the method answers that the caller's bytes are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from strata.rpc import coordinator_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are not the message the method takes."""

    why: str


def handlers(service: object) -> grpc.GenericRpcHandler[Any, Any]:
    """Every method of the contract, answered by the method of the same name on `service`."""
    table = {}
    for method in SERVICE.methods:
        make = (
            grpc.stream_stream_rpc_method_handler
            if method.client_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        table[method.name] = make(
            getattr(service, method.name),
            request_deserializer=_reader(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, table)


def _reader(kind: Any) -> Callable[[bytes], Any]:
    parse = kind.FromString

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return Malformed(str(error))

    return read
