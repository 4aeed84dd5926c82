"""One answer of the asyncio client, read as it is made."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from types import TracebackType
from typing import Protocol, Self, cast

import grpc
import grpc.aio

from stepahead.client.errors import RequestCancelledError, StepaheadError, from_rpc_error
from stepahead.client.folding import FoldedStream
from stepahead.client.reattaching import CANCEL_TIMEOUT_S, OnConnectionChange, leaves_request_running
from stepahead.client.requests import GenerationRequest
from stepahead.client.values import Completion, Delta
from stepahead.v1 import generation_pb2, generation_pb2_grpc


class _ResponseCall(Protocol):
    """What is used of grpc's streaming call."""

    # EOF, a sentinel without a public type, is the other thing that comes back.
    async def read(self) -> object: ...
    def cancel(self) -> bool: ...


class _CancelCall(Protocol):
    """What is used of grpc's unary call."""

    def code(self) -> Awaitable[grpc.StatusCode]: ...


class AsyncCompletionStream(FoldedStream):
    """The answer to one request, as it is made.

    Use it as a context manager and iterate inside::

        async with client.stream("Once upon a time") as stream:
            async for delta in stream:
                print(delta.text, end="")
            completion = await stream.completion()

    The call starts on entry. A lost connection is continued without a gap or a repeat (`reattach_window`). Leaving
    early, by whatever way, cancels the request on the server.
    """

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationServiceStub,
        request: GenerationRequest,
        message: generation_pb2.GenerateRequest,
        open_streams: "set[AsyncCompletionStream]",
        on_connection_change: OnConnectionChange | None = None,
    ) -> None:
        super().__init__(request, message, on_connection_change)
        self._stub = stub
        # The client's, which closes them.
        self._open_streams = open_streams
        self._call: _ResponseCall | None = None
        self._cancel_call: _CancelCall | None = None
        self._ended = False
        self._cancelled = asyncio.Event()
        self._pending: deque[Delta] = deque()

    async def completion(self) -> Completion:
        """Reads the rest of the stream and returns the finished request. Raises StepaheadError."""
        async for _ in self:
            pass
        return self._fold.completion()

    def cancel(self) -> None:
        """Cancels the request; a waiting iteration ends with RequestCancelledError."""
        if self._call is None or self._ended or self._cancelled.is_set():
            return
        self._cancelled.set()
        self._call.cancel()
        self._cancel_on_server()

    async def close(self) -> None:
        """Cancels what has not ended and waits until the server knows, as leaving the stream does. Idempotent."""
        self.cancel()
        self._ended = True
        self._open_streams.discard(self)
        if self._cancel_call is not None:
            # The way to wait that never raises. Best effort: if the call fails, the request ends by itself when its
            # window is over.
            await self._cancel_call.code()

    async def __aenter__(self) -> Self:
        if self._call is not None:
            raise RuntimeError("a stream can be entered once")
        self._start_clock(time.monotonic())
        self._open_streams.add(self)
        timeout_s = self._call_timeout_s(time.monotonic())
        self._call = cast(_ResponseCall, self._stub.Generate(self._message, timeout=timeout_s))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._call is None:
            raise RuntimeError("use the stream in a with statement: async with client.stream(...) as stream")
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            response = await self._read(self._call)
            if response is None:
                self._ended = True
                self._fold.completion()
                raise StopAsyncIteration
            self._pending.extend(self._fold.feed(response.events))
        return self._pending.popleft()

    async def _read(
        self, call: _ResponseCall
    ) -> generation_pb2.GenerateResponse | generation_pb2.AttachResponse | None:
        while True:
            try:
                response = await call.read()
            except grpc.RpcError as error:
                if self._fold.finished:
                    # Only the status was lost, which could say nothing new.
                    return None
                call = await self._attach_after(from_rpc_error(error))
            except asyncio.CancelledError:
                # grpc.aio reports a call cancelled from this side as if the task had been cancelled.
                if not self._cancelled.is_set():
                    raise
                self._ended = True
                raise RequestCancelledError("cancelled by this client", code="CANCELLED") from None
            else:
                if response is grpc.aio.EOF:
                    return None
                message = cast(generation_pb2.GenerateResponse | generation_pb2.AttachResponse, response)
                self._note_answer(message.events)
                return message

    async def _attach_after(self, error: StepaheadError) -> _ResponseCall:
        """The next call of a stream that broke. Raises StepaheadError if there is none."""
        try:
            delay_s = self._delay_after(error, time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cancelled.wait(), delay_s)
            if self._cancelled.is_set():
                raise RequestCancelledError("cancelled by this client", code="CANCELLED")
        except StepaheadError as final:
            self._ended = True
            if leaves_request_running(final) and not self._cancelled.is_set():
                self._cancel_on_server()
            raise
        timeout_s = self._call_timeout_s(time.monotonic())
        self._call = cast(_ResponseCall, self._stub.Attach(self._attach_message(), timeout=timeout_s))
        return self._call

    def _cancel_on_server(self) -> None:
        """Ends a request that would outlive its stream; `close` waits for it."""
        if self._outlives_stream:
            call = self._stub.Cancel(self._cancel_message(), timeout=CANCEL_TIMEOUT_S)
            self._cancel_call = cast(_CancelCall, call)
