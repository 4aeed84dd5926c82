"""Many requests over one stream in each direction.

One server message holds whatever was pending, so that 256 streams cost as many messages per second as one.
Commands leave through one writer task; answers are read by whoever iterates.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, Unpack, cast

import grpc
import grpc.aio

from stepahead.client.errors import ProtocolError, StepaheadError, from_rpc_error, from_status
from stepahead.client.folding import CompletionFold
from stepahead.client.messages import generate_message
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


class AsyncMultiplex:
    """A session of many requests over one stream; made by `AsyncClient.multiplex()`.

    Submit, then read updates until nothing is outstanding::

        async with client.multiplex() as session:
            handles = [await session.submit(prompt, max_tokens=8) for prompt in prompts]
            async for update in session:
                ...
                if session.num_live == 0:
                    break

    The iteration ends when the server closes the stream, or raises StepaheadError when the stream breaks.
    One task iterates; any task of the loop may submit and cancel. Leaving the session cancels what still
    runs. A lost connection ends it: `reattach_window` has no meaning here. Requests with `text=False` arrive as
    columns and cost least.
    """

    def __init__(self, start: Callable[[], MultiplexCall], *, timeout: float | None = None) -> None:
        self._start = start
        self._timeout = timeout
        self._call: MultiplexCall | None = None
        self._writer: asyncio.Task[None] | None = None
        self._commands: asyncio.Queue[generation_pb2.MultiplexRequest] = asyncio.Queue(_MAX_PENDING_COMMANDS)
        self._folds: dict[int, CompletionFold] = {}
        self._next_handle = 1
        # Ends that came with a message but have not been yielded yet.
        self._num_unread_ends = 0

    @property
    def num_live(self) -> int:
        """Requests whose end has not been read; 0 means that no update is outstanding."""
        return len(self._folds) + self._num_unread_ends

    async def submit(self, prompt: Prompt | GenerationRequest, **options: Unpack[GenerateOptions]) -> int:
        """Starts a request and returns its handle. Raises InvalidRequestError for values that do not fit."""
        request = with_default_timeout(make_request(prompt, **options), self._timeout)
        message = generate_message(request, multiplexed=True)
        handle = self._free_handle()
        self._folds[handle] = CompletionFold(request)
        submit = generation_pb2.MultiplexSubmit(handle=handle, request=message)
        await self._commands.put(generation_pb2.MultiplexRequest(submit=submit))
        return handle

    async def cancel(self, handles: Iterable[int]) -> None:
        """Ends requests; each then ends with RequestCancelledError, unless it has ended already."""
        cancel = generation_pb2.MultiplexCancel(handles=handles)
        await self._commands.put(generation_pb2.MultiplexRequest(cancel=cancel))

    async def read(self) -> list[MultiplexUpdate] | None:
        """The updates of the next server message, at most one per handle; None once the stream has ended."""
        if self._call is None:
            raise RuntimeError("use the session as async with client.multiplex() as session")
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        if response is grpc.aio.EOF:
            if self._folds:
                raise ProtocolError(f"the stream ended while {len(self._folds)} requests had not")
            return None
        return self._fold_response(cast(generation_pb2.MultiplexResponse, response))

    async def __aiter__(self) -> AsyncIterator[MultiplexUpdate]:
        while (updates := await self.read()) is not None:
            self._num_unread_ends = sum(update.ended for update in updates)
            for update in updates:
                self._num_unread_ends -= update.ended
                yield update

    async def __aenter__(self) -> Self:
        if self._call is not None:
            raise RuntimeError("a session can be entered once")
        self._call = self._start()
        self._writer = asyncio.create_task(self._write_commands(self._call), name="multiplex-writer")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
        if self._call is not None:
            self._call.cancel()

    async def _write_commands(self, call: MultiplexCall) -> None:
        while True:
            command = await self._commands.get()
            try:
                await call.write(command)
            except (grpc.RpcError, asyncio.InvalidStateError):
                # The stream is over; the reader learns why, and nothing can be written any more.
                return

    def _free_handle(self) -> int:
        while self._next_handle in self._folds:
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
            fold = self._live(entry.handle)
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
            self._end(failure.handle)
            earlier = updates.get(failure.handle, MultiplexUpdate(failure.handle))
            updates[failure.handle] = MultiplexUpdate(
                failure.handle, earlier.started, earlier.deltas, error=from_status(failure.status)
            )
        return list(updates.values())

    def _fold_columns(self, columns: generation_pb2.TokenColumns) -> list[tuple[int, Delta]]:
        handles, firsts = list(columns.handles), list(columns.first_token_indexes)
        # No counts means one token per handle: the steady state of decoding.
        counts: Sequence[int] = list(columns.token_counts) or [1] * len(handles)
        token_ids = list(columns.token_ids)
        if not len(handles) == len(firsts) == len(counts) or sum(counts) != len(token_ids):
            raise ProtocolError("the columns of a message have different lengths")
        deltas: list[tuple[int, Delta]] = []
        begin = 0
        for handle, first, count in zip(handles, firsts, counts, strict=True):
            delta = self._live(handle).feed_tokens(first, token_ids[begin : begin + count])
            deltas.append((handle, delta))
            begin += count
        return deltas

    def _live(self, handle: int) -> CompletionFold:
        fold = self._folds.get(handle)
        if fold is None:
            raise ProtocolError(f"news of handle {handle}, which is not live")
        return fold

    def _end(self, handle: int) -> CompletionFold:
        fold = self._live(handle)
        del self._folds[handle]
        return fold
