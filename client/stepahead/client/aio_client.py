"""The asyncio client: the same methods as the blocking one, awaited."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack, cast

import grpc

from stepahead.client import convert
from stepahead.client.aio_stream import AsyncCompletionStream
from stepahead.client.channel import DEFAULT_ADDRESS, open_aio_channel
from stepahead.client.errors import DeadlineError, UnavailableError, from_rpc_error
from stepahead.client.messages import (
    cancel_message,
    chat_prompt,
    check_timeout,
    detokenize_message,
    generate_message,
    tokenize_message,
)
from stepahead.client.multiplex import AsyncMultiplex, MultiplexCall
from stepahead.client.readiness import POLL_INTERVAL_S, Readiness
from stepahead.client.reattaching import CANCEL_TIMEOUT_S, OnConnectionChange
from stepahead.client.requests import (
    ChatTurn,
    GenerateOptions,
    GenerationRequest,
    Prompt,
    make_request,
    with_default_timeout,
)
from stepahead.client.status import ServerStatus
from stepahead.client.values import CancelOutcome, Completion, ModelInfo
from stepahead.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Request_contra = TypeVar("_Request_contra", contravariant=True)
_Response_co = TypeVar("_Response_co", covariant=True)


class _UnaryCall(Protocol[_Request_contra, _Response_co]):
    def __call__(self, request: _Request_contra, *, timeout: float | None = None) -> Awaitable[_Response_co]: ...


class AsyncClient:
    """An asyncio client of one scheduler, for one event loop.

    `timeout` is the default deadline of a generation, `call_timeout` that of every other call, both in
    seconds (None: none). Create it inside the running loop; the connection opens with the first call and is
    shared by all of them. Every method raises a StepaheadError.

    `on_connection_change` is called when a stream loses its connection and tries to attach again, and when it is
    back, in the task that reads the stream; what it raises ends the reading.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        call_timeout: float | None = 30.0,
        on_connection_change: OnConnectionChange | None = None,
    ) -> None:
        self._on_connection_change = on_connection_change
        self._timeout = check_timeout(timeout)
        self._call_timeout = check_timeout(call_timeout)
        self.address = address
        self._streams: set[AsyncCompletionStream] = set()
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
        for stream in tuple(self._streams):
            await stream.close()
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
        request = with_default_timeout(make_request(prompt, **options), self._timeout)
        return AsyncCompletionStream(
            self._generation, request, generate_message(request), self._streams, self._on_connection_change
        )

    def multiplex(self) -> AsyncMultiplex:
        """Many requests over one stream; see AsyncMultiplex. Their default timeout is the client's."""

        def start() -> MultiplexCall:
            return cast(MultiplexCall, self._generation.Multiplex())

        async def cancel(request_ids: Sequence[str]) -> None:
            message = generation_pb2.CancelRequest(request_ids=request_ids)
            # Best effort: if this fails, the requests end by themselves when their windows are over.
            with contextlib.suppress(grpc.RpcError):
                await self._generation.Cancel(message, timeout=CANCEL_TIMEOUT_S)

        return AsyncMultiplex(start, cancel, timeout=self._timeout, on_connection_change=self._on_connection_change)

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
