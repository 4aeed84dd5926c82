"""One answer of the blocking client, read as it is made."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self, cast

import grpc

from stepahead.client.errors import RequestCancelledError, StepaheadError, from_rpc_error
from stepahead.client.folding import FoldedStream
from stepahead.client.reattaching import CANCEL_TIMEOUT_S, OnConnectionChange, leaves_request_running
from stepahead.client.requests import GenerationRequest
from stepahead.client.values import Completion, Delta
from stepahead.v1 import generation_pb2, generation_pb2_grpc


class _ResponseCall(Protocol):
    """What is used of grpc's streaming call."""

    def __next__(self) -> generation_pb2.GenerateResponse | generation_pb2.AttachResponse: ...
    def cancel(self) -> bool: ...


class CompletionStream(FoldedStream):
    """The answer to one request, as it is made.

    Use it as a context manager and iterate inside::

        with client.stream("Once upon a time") as stream:
            for delta in stream:
                print(delta.text, end="")
            completion = stream.completion()

    The call starts on entry. A lost connection is continued without a gap or a repeat (`reattach_window`). Leaving
    early, by whatever way, cancels the request on the server.
    """

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationServiceStub,
        request: GenerationRequest,
        message: generation_pb2.GenerateRequest,
        open_streams: "set[CompletionStream]",
        on_connection_change: OnConnectionChange | None = None,
    ) -> None:
        super().__init__(request, message, on_connection_change)
        self._stub = stub
        # The client's, which closes them.
        self._open_streams = open_streams
        self._call: _ResponseCall | None = None
        self._ended = False
        self._cancelled = threading.Event()
        # Held until the server has been told: leaving waits for a thread that is at it, since closing the client
        # would end its call.
        self._cancelling = threading.RLock()
        self._pending: deque[Delta] = deque()

    def completion(self) -> Completion:
        """Reads the rest of the stream and returns the finished request. Raises StepaheadError."""
        for _ in self:
            pass
        return self._fold.completion()

    def cancel(self) -> None:
        """Cancels the request; a blocked iteration ends with RequestCancelledError. Thread-safe."""
        with self._cancelling:
            if self._call is None or self._ended or self._cancelled.is_set():
                return
            self._cancelled.set()
            self._call.cancel()
            self._cancel_on_server()

    def __enter__(self) -> Self:
        if self._call is not None:
            raise RuntimeError("a stream can be entered once")
        self._start_clock(time.monotonic())
        self._open_streams.add(self)
        timeout_s = self._call_timeout_s(time.monotonic())
        self._call = cast(_ResponseCall, self._stub.Generate(self._message, timeout=timeout_s))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
        self._ended = True
        self._open_streams.discard(self)

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self._call is None:
            raise RuntimeError("use the stream in a with statement: with client.stream(...) as stream")
        while not self._pending:
            if self._ended:
                raise StopIteration
            response = self._read(self._call)
            if response is None:
                self._ended = True
                self._fold.completion()
                raise StopIteration
            self._pending.extend(self._fold.feed(response.events))
        return self._pending.popleft()

    def _read(self, call: _ResponseCall) -> generation_pb2.GenerateResponse | generation_pb2.AttachResponse | None:
        while True:
            try:
                response = next(call)
            except StopIteration:
                return None
            except grpc.RpcError as error:
                if self._fold.finished:
                    # Only the status was lost, which could say nothing new.
                    return None
                call = self._attach_after(from_rpc_error(error))
            else:
                self._note_answer(response.events)
                return response

    def _attach_after(self, error: StepaheadError) -> _ResponseCall:
        """The next call of a stream that broke. Raises StepaheadError if there is none."""
        try:
            if self._cancelled.wait(self._delay_after(error, time.monotonic())):
                raise RequestCancelledError("cancelled by this client", code="CANCELLED")
        except StepaheadError as final:
            self._ended = True
            if leaves_request_running(final) and not self._cancelled.is_set():
                self._cancel_on_server()
            raise
        timeout_s = self._call_timeout_s(time.monotonic())
        self._call = call = cast(_ResponseCall, self._stub.Attach(self._attach_message(), timeout=timeout_s))
        # Whoever cancels in between has cancelled the broken call.
        if self._cancelled.is_set():
            call.cancel()
        return call

    def _cancel_on_server(self) -> None:
        """Ends a request that would outlive its stream."""
        if not self._outlives_stream:
            return
        # Best effort: if this fails, the request ends by itself when its window is over.
        with contextlib.suppress(grpc.RpcError):
            self._stub.Cancel(self._cancel_message(), timeout=CANCEL_TIMEOUT_S)
