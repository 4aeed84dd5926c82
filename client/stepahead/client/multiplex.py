"""Many requests over one stream in each direction.

One server message holds whatever was pending, so that 256 streams cost as many messages per second as one.
Commands leave through one writer task; answers are read by whoever iterates.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, Unpack, cast

import grpc
import grpc.aio

from stepahead.client.errors import ProtocolError, StepaheadError, from_rpc_error, from_status
from stepahead.client.folding import CompletionFold
from stepahead.client.messages import generate_message
from stepahead.client.reattaching import UNKNOWN_THERE, ConnectionChange, OnConnectionChange, Reattachment
from stepahead.client.requests import (
    GenerateOptions,
    GenerationRequest,
    Prompt,
    make_request,
    with_default_timeout,
)
from stepahead.client.values import Completion, Delta
from stepahead.v1 import generation_pb2

# Commands that may wait for the transport before `submit` waits too.
_MAX_PENDING_COMMANDS = 1024
_MAX_HANDLE = 2**32 - 1
# Ids that one Cancel may name.
_MAX_CANCEL_IDS = 1024


class MultiplexCall(Protocol):
    """What is used of grpc's bidirectional call."""

    # EOF, a sentinel without a public type, is the other thing that comes back.
    async def read(self) -> object:
        """The next message, or EOF."""
        ...

    async def write(self, request: generation_pb2.MultiplexRequest) -> None:
        """Hands one message to the transport."""
        ...

    def cancel(self) -> bool:
        """Ends the call."""
        ...


@dataclass(frozen=True, slots=True)
class MultiplexUpdate:
    """News of one request. At most one of `completion` and `error` is set, and then it is the last update."""

    handle: int
    # Set in the update that says the request was admitted.
    started: bool = False
    deltas: tuple[Delta, ...] = ()
    completion: Completion | None = None
    error: StepaheadError | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing follows for this request."""
        return self.completion is not None or self.error is not None


@dataclass(slots=True)
class _Live:
    """A request whose end has not come."""

    message: generation_pb2.GenerateRequest
    fold: CompletionFold
    # Whether the transport has yet to be given its submit.
    is_unsent: bool = True
    is_cancelled: bool = False
    # What broke the stream that it is attached after, until the server has said that it knows the request.
    broken_by: StepaheadError | None = None

    @property
    def window_s(self) -> float:
        """How long it may be without a stream."""
        return self.message.scheduling.reattach_window_ms / 1000


class AsyncMultiplex:
    """A session of many requests over one stream; made by `AsyncClient.multiplex()`.

    Submit, then read updates until nothing is outstanding::

        async with client.multiplex() as session:
            handles = [await session.submit(prompt, max_tokens=8) for prompt in prompts]
            async for update in session:
                ...
                if session.num_live == 0:
                    break

    The iteration ends when the server closes the stream, or raises StepaheadError when the stream breaks for good.
    A lost connection is continued without a gap or a repeat, as that of a single stream is, within the longest
    `reattach_window` of what runs; a request with `reattach_window=0` then ends with the error of the break.

    One task iterates; any task of the loop may submit and cancel. Leaving the session cancels what still runs.
    Requests with `text=False` arrive as columns and cost least.
    """

    def __init__(
        self,
        start: Callable[[], MultiplexCall],
        cancel_on_server: Callable[[Sequence[str]], Awaitable[None]],
        *,
        timeout: float | None = None,
        on_connection_change: OnConnectionChange | None = None,
    ) -> None:
        self._start = start
        self._cancel_on_server = cancel_on_server
        self._timeout = timeout
        self._on_connection_change = on_connection_change
        self._call: MultiplexCall | None = None
        self._writer: asyncio.Task[None] | None = None
        self._commands: asyncio.Queue[generation_pb2.MultiplexRequest] = asyncio.Queue(_MAX_PENDING_COMMANDS)
        self._live_requests: dict[int, _Live] = {}
        self._next_handle = 1
        # Ends that came with a message but have not been yielded yet.
        self._num_unread_ends = 0
        self._was_accepted = False
        # While the stream is broken, or has said nothing new since.
        self._reattachment: Reattachment | None = None
        self._gave_up = False

    @property
    def num_live(self) -> int:
        """Requests whose end has not been read; 0 means that no update is outstanding."""
        return len(self._live_requests) + self._num_unread_ends

    async def submit(self, prompt: Prompt | GenerationRequest, **options: Unpack[GenerateOptions]) -> int:
        """Starts a request and returns its handle. Raises InvalidRequestError for values that do not fit."""
        request = with_default_timeout(make_request(prompt, **options), self._timeout)
        message = generate_message(request)
        handle = self._free_handle()
        self._live_requests[handle] = _Live(message, CompletionFold(request))
        await self._commands.put(_submit(handle, message))
        return handle

    async def cancel(self, handles: Iterable[int]) -> None:
        """Ends requests; each then ends with RequestCancelledError, unless it has ended already."""
        wanted = list(handles)
        for handle in wanted:
            live = self._live_requests.get(handle)
            if live is not None:
                live.is_cancelled = True
        await self._commands.put(_cancel(wanted))

    async def read(self) -> list[MultiplexUpdate] | None:
        """The updates of the next server message, at most one per handle; None once the stream has ended."""
        if self._call is None:
            raise RuntimeError("use the session as async with client.multiplex() as session")
        while True:
            try:
                response = await self._call.read()
            except grpc.RpcError as error:
                failed = await self._attach_after(from_rpc_error(error))
                if failed:
                    return failed
                continue
            if response is grpc.aio.EOF:
                if self._live_requests:
                    raise ProtocolError(f"the stream ended while {len(self._live_requests)} requests had not")
                return None
            message = cast(generation_pb2.MultiplexResponse, response)
            self._note_answer(message)
            return self._fold_response(message)

    async def __aiter__(self) -> AsyncIterator[MultiplexUpdate]:
        while (updates := await self.read()) is not None:
            self._num_unread_ends = sum(update.ended for update in updates)
            for update in updates:
                self._num_unread_ends -= update.ended
                yield update

    async def __aenter__(self) -> Self:
        if self._call is not None:
            raise RuntimeError("a session can be entered once")
        self._open([])
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop_writer()
        if self._call is not None:
            self._call.cancel()
        left = [live.message.request_id for live in self._live_requests.values() if live.window_s]
        if not self._gave_up:
            for begin in range(0, len(left), _MAX_CANCEL_IDS):
                await self._cancel_on_server(left[begin : begin + _MAX_CANCEL_IDS])

    # ------------------------------------------------------------------------------------------ the stream

    def _open(self, commands: Sequence[generation_pb2.MultiplexRequest]) -> None:
        self._call = call = self._start()
        self._writer = asyncio.create_task(self._write_commands(call, commands), name="multiplex-writer")

    async def _stop_writer(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])

    async def _write_commands(
        self, call: MultiplexCall, commands: Sequence[generation_pb2.MultiplexRequest]
    ) -> None:
        try:
            for command in commands:
                await call.write(command)
            while True:
                command = await self._commands.get()
                live = self._live_requests.get(command.submit.handle) if command.HasField("submit") else None
                if live is not None:
                    # From here on a break may have lost it: then it is submitted again.
                    live.is_unsent = False
                await call.write(command)
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The stream is over; the reader learns why, and nothing can be written on it any more.
            return

    async def _attach_after(self, error: StepaheadError) -> list[MultiplexUpdate]:
        """Continues a stream that broke on another one; returns the ends of requests that cannot be.

        Raises:
            StepaheadError: what broke the stream, if it is not continued.
        """
        now_s = time.monotonic()
        if self._reattachment is None:
            window_s = max((live.window_s for live in self._live_requests.values()), default=0.0)
            self._reattachment = Reattachment(window_s)
            if self._was_accepted:
                self._reattachment.note_answer(is_news=False)
        try:
            delay_s = self._reattachment.delay_after(error, now_s)
        except StepaheadError:
            self._gave_up = True
            raise
        news = self._reattachment.news_after_break(now_s)
        if news is not None and self._on_connection_change is not None:
            self._on_connection_change(ConnectionChange("", *news))
        await self._stop_writer()
        await asyncio.sleep(delay_s)
        ended = [handle for handle, live in self._live_requests.items() if not live.window_s and not live.is_unsent]
        for handle in ended:
            self._end(handle)
        self._open([command for item in self._live_requests.items() for command in _again(*item, error)])
        return [MultiplexUpdate(handle, error=error) for handle in ended]

    def _note_answer(self, message: generation_pb2.MultiplexResponse) -> None:
        self._was_accepted = True
        if self._reattachment is None:
            return
        if self._reattachment.is_back() and self._on_connection_change is not None:
            self._on_connection_change(ConnectionChange(""))
        # Only news ends the break: a server that breaks each stream at once is not asked for ever.
        said = (event for entry in message.events for event in entry.events)
        if message.HasField("tokens") or message.failures or any(not event.HasField("started") for event in said):
            self._reattachment = None

    def _free_handle(self) -> int:
        while self._next_handle in self._live_requests:
            self._next_handle = self._next_handle % _MAX_HANDLE + 1
        handle = self._next_handle
        self._next_handle = handle % _MAX_HANDLE + 1
        return handle

    def _fold_response(self, response: generation_pb2.MultiplexResponse) -> list[MultiplexUpdate]:
        updates: dict[int, MultiplexUpdate] = {}
        if response.HasField("tokens"):
            for handle, delta in self._fold_columns(response.tokens):
                updates[handle] = MultiplexUpdate(handle, deltas=(delta,))
        for entry in response.events:
            fold = self._fold(entry.handle)
            was_started = fold.started is not None
            deltas = fold.feed(entry.events)
            earlier = updates.get(entry.handle, MultiplexUpdate(entry.handle))
            updates[entry.handle] = MultiplexUpdate(
                entry.handle,
                started=earlier.started or (fold.started is not None and not was_started),
                deltas=(*earlier.deltas, *deltas),
                completion=self._end(entry.handle).completion() if fold.finished else None,
            )
        for failure in response.failures:
            error = from_status(failure.status)
            broken_by = self._live_request(failure.handle).broken_by
            if broken_by is not None and isinstance(error, UNKNOWN_THERE):
                error = broken_by
            self._end(failure.handle)
            earlier = updates.get(failure.handle, MultiplexUpdate(failure.handle))
            updates[failure.handle] = MultiplexUpdate(failure.handle, earlier.started, earlier.deltas, error=error)
        return list(updates.values())

    def _fold_columns(self, columns: generation_pb2.TokenColumns) -> list[tuple[int, Delta]]:
        handles, firsts = columns.handles[:], columns.first_token_indexes[:]
        # No counts means one token per handle: the steady state of decoding.
        counts: Sequence[int] = columns.token_counts[:] or [1] * len(handles)
        token_ids = columns.token_ids[:]
        if not len(handles) == len(firsts) == len(counts) or sum(counts) != len(token_ids):
            raise ProtocolError("the columns of a message have different lengths")
        deltas: list[tuple[int, Delta]] = []
        begin = 0
        for handle, first, count in zip(handles, firsts, counts, strict=True):
            delta = self._fold(handle).feed_tokens(first, token_ids[begin : begin + count])
            deltas.append((handle, delta))
            begin += count
        return deltas

    def _live_request(self, handle: int) -> _Live:
        live = self._live_requests.get(handle)
        if live is None:
            raise ProtocolError(f"news of handle {handle}, which is not live")
        return live

    def _fold(self, handle: int) -> CompletionFold:
        """Where news of a request goes; the server knows the request, then."""
        live = self._live_request(handle)
        live.broken_by = None
        return live.fold

    def _end(self, handle: int) -> CompletionFold:
        live = self._live_request(handle)
        del self._live_requests[handle]
        return live.fold


def _submit(handle: int, message: generation_pb2.GenerateRequest) -> generation_pb2.MultiplexRequest:
    return generation_pb2.MultiplexRequest(submit=generation_pb2.MultiplexSubmit(handle=handle, request=message))


def _cancel(handles: Sequence[int]) -> generation_pb2.MultiplexRequest:
    return generation_pb2.MultiplexRequest(cancel=generation_pb2.MultiplexCancel(handles=handles))


def _again(handle: int, live: _Live, error: StepaheadError) -> list[generation_pb2.MultiplexRequest]:
    """What makes another stream go on with a request; nothing if its submit is still to be written."""
    if live.is_unsent:
        return []
    if live.fold.started is None:
        # Nobody knows whether it arrived. The same id with the same body is the same request.
        commands = [_submit(handle, live.message)]
    else:
        live.broken_by = live.broken_by or error
        request = generation_pb2.AttachRequest(
            request_id=live.message.request_id, next_token_indexes=live.fold.continue_from()
        )
        attach = generation_pb2.MultiplexAttach(handle=handle, request=request)
        commands = [generation_pb2.MultiplexRequest(attach=attach)]
    # A cancel may have been lost on the way.
    return [*commands, _cancel([handle])] if live.is_cancelled else commands
