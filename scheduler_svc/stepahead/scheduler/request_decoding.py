"""Requests that cannot be decoded end with INVALID_ARGUMENT.

grpc.aio decodes a request before any of our code runs, and turns a failure into UNKNOWN with the exception's text.
Text that is not UTF-8 is such a failure, and clients in other languages do send it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError
from typing_extensions import override

from stepahead.scheduler.errors import FieldViolation, InvalidRequest, abort

PREFIX = "/stepahead."


class Undecodable:
    """Stands for a request whose bytes are no message."""

    @staticmethod
    def error() -> InvalidRequest:
        """What the client is told."""
        text = "cannot be decoded: not a message of this method, or text that is not UTF-8"
        return InvalidRequest([FieldViolation("request", text)])


class RequestDecoding(grpc.aio.ServerInterceptor):
    """Wraps our methods; others pass. Handlers of request streams meet `Undecodable` in their reads."""

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = cast(Any, await continuation(handler_call_details))
        if handler is None or not handler_call_details.method.startswith(PREFIX):
            return handler
        decode: Callable[[bytes], object] = handler.request_deserializer

        def decode_or_note(data: bytes) -> object:
            try:
                return decode(data)
            except DecodeError:
                return Undecodable()

        kwargs: dict[str, Any] = {
            "request_deserializer": decode_or_note,
            "response_serializer": handler.response_serializer,
        }
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, **kwargs)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refusing(handler.unary_stream), **kwargs)
        return grpc.unary_unary_rpc_method_handler(_refusing(handler.unary_unary), **kwargs)


def _refusing(behavior: Callable[[object, Any], Awaitable[object]]) -> Any:  # noqa: ANN401 - as grpc has it
    async def refuse_or_handle(request: object, context: Any) -> object:  # noqa: ANN401
        if isinstance(request, Undecodable):
            await abort(context, [request.error()])
        return await behavior(request, context)

    return refuse_or_handle
