"""Calling a coordinator by the name that it serves its methods under: `strata.v1`, or `coordinator`, as version 0.1 does.

A method that is served under neither name is `UNIMPLEMENTED`, as ever. Which name is the right one is found out by calls, and
found out again when the coordinator has been replaced by another version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from strata.rpc.methods import EARLIER_NAME, NAME, SERVICE


class Stub:
    """The methods as attributes, under one name of the service."""

    def __init__(self, channel: Any, name: str) -> None:
        self.name = name
        for method in SERVICE.methods:
            make = channel.stream_stream if method.client_streaming else channel.unary_unary
            call = make(
                f"/{name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def method(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self, name)
        return found


class Stubs:
    """For channels of `grpc` and of `grpc.aio` alike; one thread or loop at a time learns the name, and all may use it."""

    def __init__(self, channel: Any) -> None:
        self._known = (Stub(channel, NAME), Stub(channel, EARLIER_NAME))
        self.current = self._known[0]

    @property
    def other(self) -> Stub:
        return self._known[1 - self._known.index(self.current)]

    def call(self, method: str, request: Any, **options: Any) -> Any:
        try:
            return self.current.method(method)(request, **options)
        except grpc.RpcError as error:
            if not is_unserved(error):
                raise
            refused, other = error, self.other
        try:
            answer = other.method(method)(request, **options)
        except grpc.RpcError as error:
            self._learn(other, error)
            raise (refused if is_unserved(error) else error) from None
        self.current = other
        return answer

    async def call_async(self, method: str, request: Any, **options: Any) -> Any:
        try:
            return await self.current.method(method)(request, **options)
        except grpc.RpcError as error:
            if not is_unserved(error):
                raise
            refused, other = error, self.other
        try:
            answer = await other.method(method)(request, **options)
        except grpc.RpcError as error:
            self._learn(other, error)
            raise (refused if is_unserved(error) else error) from None
        self.current = other
        return answer

    def stream_failed(self, error: grpc.RpcError) -> None:
        """The next stream is opened by the other name, where this one is not served."""
        if is_unserved(error):
            self.current = self.other

    def _learn(self, stub: Stub, error: grpc.RpcError) -> None:
        if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE):
            self.current = stub


def is_unserved(error: grpc.RpcError) -> bool:
    return bool(error.code() is grpc.StatusCode.UNIMPLEMENTED)
