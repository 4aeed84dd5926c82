"""The asyncio client: the same methods as the blocking one, awaited."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio

from stepahead.client import convert
from stepahead.client.channel import DEFAULT_ADDRESS, open_aio_channel
from stepahead.client.errors import DeadlineError, RequestCancelledError, UnavailableError, from_rpc_error
from stepahead.client.folding import FoldedStream
from stepahead.client.multiplex import AsyncMultiplex, MultiplexCall
from stepahead.client.readiness import POLL_INTERVAL_S, Readiness
from stepahead.client.requests import (
    ChatTurn,
    GenerateOptions,
    GenerationRequest,
    Prompt,
    cancel_message,
    chat_prompt,
    check_timeout,
    detokenize_message,
    generate_message,
    make_request,
    tokenize_message,
)
from stepahead.client.status import ServerStatus
from stepahead.client.values import CancelOutcome, Completion, Delta, ModelInfo
from stepahead.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Request_contra = TypeVar("_Request_contra", contravariant=True)
_Response_co = TypeVar("_Response_co", covariant=True)


class _UnaryCall(Protocol[_Request_contra, _Response_co]):
    def __call__(self, request: _Request_contra, *, timeout: float | None = None) -> Awaitable[_Response_co]: ...


class _ResponseCall(Protocol):
    """What is used of grpc's streaming call."""

    # EOF, a sentinel without a public type, is the other thing that comes back.
    async def read(self) -> object: ...
    def cancel(self) -> bool: ...


class AsyncCompletionStream(FoldedStream):
    """The answer to one request, as it is made.

    Use it as a context manager and iterate inside::

        async with client.stream("Once upon a time") as stream:
            async for delta in stream:
                print(delta.text, end="")
            completion = await stream.completion()

    The call starts on entry. Leaving early, by whatever way, cancels the request on the server.
    """

    def __init__(self, start: Callable[[], _ResponseCall], request: GenerationRequest) -> None:
        super().__init__(request)
        self._start = start
        self._call: _ResponseCall | None = None
        self._ended = False
        self._cancelled = False
        self._pending: deque[Delta] = deque()

    async def completion(self) -> Completion:
        """Reads the rest of the stream and returns the finished request. Raises StepaheadError."""
        async for _ in self:
            pass
        return self._fold.completion()

    def cancel(self) -> None:
        """Cancels the request; a waiting iteration ends with RequestCancelledError."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        if self._call is not None:
            raise RuntimeError("a stream can be entered once")
        self._call = self._start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A call object that is only dropped keeps running on the server.
        if not self._ended:
            self._ended = True
            self.cancel()

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

    async def _read(self, call: _ResponseCall) -> generation_pb2.GenerateResponse | None:
        try:
            response = await call.read()
        except grpc.RpcError as error:
            self._ended = True
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # grpc.aio reports a call cancelled from this side as if the task had been cancelled.
            if not self._cancelled:
                raise
            self._ended = True
            raise RequestCancelledError("cancelled by this client", code="CANCELLED") from None
        if response is grpc.aio.EOF:
            return None
        return cast(generation_pb2.GenerateResponse, response)


class AsyncClient:
    """An asyncio client of one scheduler, for one event loop.

    `timeout` is the default deadline of a generation, `call_timeout` that of every other call, both in
    seconds (None: none). Create it inside the running loop; the connection opens with the first call and is
    shared by all of them. Every method raises a StepaheadError.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        call_timeout: float | None = 30.0,
    ) -> None:
        self._timeout = check_timeout(timeout)
        self._call_timeout = check_timeout(call_timeout)
        self.address = address
        self._channel = open_aio_channel(address)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = generation_pb2_grpc.ModelServiceStub(self._channel)
        self._operations = operations_pb2_grpc.OperationsServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and cancels what still runs on it. Idempotent."""
        await self._channel.close()

    async def generate(self, prompt: Prompt | GenerationRequest, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates and returns the finished request; options as in GenerationRequest."""
        async with self.stream(prompt, **options) as stream:
            return await stream.completion()

    async def chat(self, messages: Sequence[ChatTurn], **options: Unpack[GenerateOptions]) -> Completion:
        """Answers a conversation. Unlike `generate`, refuses anything that is no sequence of turns."""
        return await self.generate(chat_prompt(messages), **options)

    def stream(
        self, prompt: Prompt | GenerationRequest, **options: Unpack[GenerateOptions]
    ) -> AsyncCompletionStream:
        """The answer as it is made; see AsyncCompletionStream. Values that do not fit are refused at once."""
        request = make_request(prompt, **options)
        timeout = self._timeout if request.timeout is None else check_timeout(request.timeout)
        message = generate_message(request, timeout_in_message=False)

        def start() -> _ResponseCall:
            return cast(_ResponseCall, self._generation.Generate(message, timeout=timeout))

        return AsyncCompletionStream(start, request)

    def multiplex(self) -> AsyncMultiplex:
        """Many requests over one stream; see AsyncMultiplex. Their default timeout is the client's."""

        def start() -> MultiplexCall:
            return cast(MultiplexCall, self._generation.Multiplex())

        return AsyncMultiplex(start, timeout=self._timeout)

    async def cancel(self, request_ids: Sequence[str]) -> dict[str, CancelOutcome]:
        """Ends requests by id; says for each what was found."""
        message = cancel_message(request_ids)
        response = await self._call(self._generation.Cancel, message)
        outcomes = map(convert.cancel_outcome, response.outcomes)
        return dict(zip(message.request_ids, outcomes, strict=True))

    async def get_model(self, model: str = "") -> ModelInfo:
        """Identity, limits and defaults of a served model ("": the only one)."""
        request = generation_pb2.GetModelRequest(model=model)
        return convert.model_info(await self._call(self._models.GetModel, request))

    async def tokenize(self, prompt: str | Sequence[ChatTurn]) -> tuple[int, ...]:
        """Token ids of a text or of a rendered conversation, as `generate` would use them."""
        return tuple((await self._call(self._models.Tokenize, tokenize_message(prompt))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        """Text of token ids, as `generate` would deliver it."""
        message = detokenize_message(token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._models.Detokenize, message)).text

    async def status(self) -> ServerStatus:
        """Everything at a glance."""
        return convert.server_status(
            await self._call(self._operations.GetStatus, operations_pb2.GetStatusRequest())
        )

    async def wait_until_ready(self, timeout: float = 60.0) -> None:  # noqa: ASYNC109 - as the blocking client
        """Returns once the server takes requests. Raises DeadlineError after `timeout` seconds."""
        readiness = Readiness(timeout, time.monotonic())
        while True:
            try:
                if readiness.is_serving(await self.status()):
                    return
            except (UnavailableError, DeadlineError) as error:
                readiness.note(error)
            readiness.refuse_if_late(time.monotonic())
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _call(self, method: _UnaryCall[_Request, _Response], request: _Request) -> _Response:
        try:
            return await method(request, timeout=self._call_timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
