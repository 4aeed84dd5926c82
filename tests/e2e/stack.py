"""A scheduler and its workers inside the test's process, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from stepahead.scheduler.server import Server
from stepahead.scheduler.settings import Settings
from stepahead.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc
from stepahead.worker.announce import Announcer
from stepahead.worker.model.registry import make_runner
from stepahead.worker.runner import Runner, StepBatch
from stepahead.worker.server import WorkerServer
from stepahead.worker.settings import WorkerSettings
from tests.conformance.double import settings

BOUND_S = 30.0
"""Nothing that is waited for takes this long; it is a bound, not a duration."""

DELIVERY_FINAL_ONLY = generation_pb2.OutputParams.DELIVERY_FINAL_ONLY


def worker_settings(model: str, **fields: Any) -> WorkerSettings:
    """A small worker: eight sequences, blocks of four tokens."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "num_kv_blocks": 512}
    return settings(**({"model": model} | sizes | fields))


def watched(runner: Runner, step_s: float, on_forward: Callable[[StepBatch], None]) -> Runner:
    """The same runner with forwards that are told of and take longer, so that a test can act meanwhile."""
    forward = runner.forward

    def slow_forward(batch: StepBatch) -> None:
        on_forward(batch)
        forward(batch)
        time.sleep(step_s)

    runner.forward = slow_forward  # pyright: ignore[reportAttributeAccessIssue]
    return runner


@asynccontextmanager
async def serve_worker(
    model: str, *, step_s: float = 0.0, on_forward: Callable[[StepBatch], None] = lambda _: None, **fields: Any
) -> AsyncIterator[WorkerServer]:
    """A loaded worker with a toy model.

    Args:
        model: the toy.
        step_s: by how much every forward takes longer.
        on_forward: told of every batch, on the device thread.
        fields: of the settings.
    """
    settings = worker_settings(model, **fields)
    server = WorkerServer(
        settings, lambda: watched(make_runner(model, dtype=settings.dtype), step_s, on_forward), Announcer(None)
    )
    await server.listen()
    try:
        await server.load()
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def serve_scheduler(*workers: str, **fields: Any) -> AsyncIterator[Stack]:
    """A scheduler of the given worker addresses; ready or not."""
    defaults: dict[str, Any] = {"listen": "127.0.0.1:0", "overlap_depth": 1, "drain_timeout_s": 0.0}
    server = Server(Settings(workers=workers, **(defaults | fields)), asyncio.get_running_loop())
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Stack(server, channel)
    finally:
        await server.stop()


@asynccontextmanager
async def serve(
    model: str = "toy:tagged", *, num_workers: int = 1, worker: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[Stack]:
    """A ready scheduler with workers of one toy model.

    Args:
        model: the toy.
        num_workers: how many.
        worker: settings of each worker.
        fields: settings of the scheduler.
    """
    async with AsyncExitStack() as exits:
        workers = [
            await exits.enter_async_context(serve_worker(model, **(worker or {}))) for _ in range(num_workers)
        ]
        stack = await exits.enter_async_context(serve_scheduler(*(each.address for each in workers), **fields))
        await eventually(lambda: len(stack.server.engine.links) == num_workers)
        yield stack


async def eventually(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], bound_s: float = BOUND_S
) -> None:
    """Polls until the condition holds."""
    async with asyncio.timeout(bound_s):
        while True:
            outcome = condition()
            if outcome if isinstance(outcome, bool) else await outcome:
                return
            await asyncio.sleep(0.005)


class Stack:
    """Stubs of one scheduler."""

    def __init__(self, server: Server, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.models = generation_pb2_grpc.ModelServiceStub(channel)
        self.operations = operations_pb2_grpc.OperationsServiceStub(channel)

    async def generate(self, *arguments: Any, **fields: Any) -> Answer:
        """One request, from start to end; arguments as of `request`."""
        return await self.answer(request(*arguments, **fields))

    async def answer(self, message: generation_pb2.GenerateRequest) -> Answer:
        """The whole answer to a request."""
        return await fold(self.open(message))

    def open(self, message: generation_pb2.GenerateRequest) -> Any:
        """A Generate call."""
        return self.generation.Generate(message, timeout=BOUND_S)

    async def answers(self, messages: Sequence[generation_pb2.GenerateRequest]) -> list[Answer]:
        """The answers to requests that run together, in order."""
        return list(await asyncio.gather(*(self.answer(each) for each in messages)))

    async def status(self) -> operations_pb2.GetStatusResponse:
        return await self.operations.GetStatus(operations_pb2.GetStatusRequest())

    async def assert_quiescent(self) -> None:
        """Waits until no request lives and every slot and block is back in its pool (rules A8, E6)."""

        async def is_quiescent() -> bool:
            status = await self.status()
            return status.num_waiting == status.num_running == 0 and all(
                counts.free + getattr(counts, "cached_idle", 0) == counts.total > 0
                for worker in status.workers
                for counts in (worker.slots, worker.blocks)
            )

        await eventually(is_quiescent)
        assert not self.server.engine.book.requests
        await eventually(lambda: not self.server.front_end.live)


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a stream said, and how it ended."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    texts: list[str] = field(default_factory=list[str])
    started: generation_pb2.Started | None = None
    choice: generation_pb2.ChoiceFinished | None = None
    finished: generation_pb2.GenerationFinished | None = None
    phases: list[int] = field(default_factory=list[int])
    num_deltas: int = 0
    code: grpc.StatusCode = grpc.StatusCode.OK
    message: str = ""
    details: list[Message] = field(default_factory=list[Message])

    def add(self, event: generation_pb2.GenerationEvent) -> None:
        """Folds the next event in, checking the order of events and token indices (rules B11, D8)."""
        kind = event.WhichOneof("kind")
        assert self.finished is None, f"{kind} after the end"
        if kind == "keepalive":
            self.phases.append(event.keepalive.phase)
        elif kind == "started":
            assert self.started is None
            assert not self.token_ids
            self.started = event.started
        elif kind == "delta":
            assert self.started is not None, "a token before Started"
            assert self.choice is None, "a token after ChoiceFinished"
            assert event.delta.first_token_index == len(self.token_ids), "indices are contiguous"
            self.add_tokens(event.delta.token_ids)
            self.text += event.delta.text
            self.texts.append(event.delta.text)
        elif kind == "choice_finished":
            assert self.choice is None
            self.choice = event.choice_finished
        else:
            assert kind == "finished"
            assert self.choice is not None
            self.finished = event.finished

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self.num_deltas += 1
        self.token_ids += token_ids

    @property
    def ok(self) -> bool:
        return self.code is grpc.StatusCode.OK and self.finished is not None

    @property
    def reason(self) -> str:
        """`STOP`, `LENGTH`, `CANCELLED` or `ERROR`; empty without an end of the choice."""
        if self.choice is None:
            return ""
        return generation_pb2.FinishReason.Name(self.choice.reason).removeprefix("FINISH_REASON_")

    def detail(self, kind: type[Message]) -> Any:
        """The status detail of a kind."""
        found = [detail for detail in self.details if isinstance(detail, kind)]
        assert len(found) == 1, (self.code, self.message, self.details)
        return found[0]

    @property
    def error_info(self) -> error_details_pb2.ErrorInfo:
        return self.detail(error_details_pb2.ErrorInfo)

    @property
    def fields(self) -> list[str]:
        """Paths of the fields the status names."""
        return [each.field for each in self.detail(error_details_pb2.BadRequest).field_violations]


_PARTS = {
    field.name: part
    for part in ("sampling", "stopping", "output", "scheduling")
    for field in generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name[part].message_type.fields
    if field.name not in ("text", "token_ids")
} | {"want_text": "output", "want_token_ids": "output"}


def request(prompt: Sequence[int] | str = (1, 2, 3), max_tokens: int | None = 8, **fields: Any) -> Any:
    """A greedy GenerateRequest. Fields of its parts are given beside its own: temperature=0.5, request_id="a".

    `text` and `token_ids` of the output part are called want_text and want_token_ids.
    """
    whole: dict[str, Any] = {"sampling": {"temperature": 0.0}, "stopping": {}, "output": {}, "scheduling": {}}
    whole["text" if isinstance(prompt, str) else "token_ids"] = (
        prompt if isinstance(prompt, str) else generation_pb2.TokenIdsInput(ids=prompt)
    )
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    for name, value in fields.items():
        into = whole[_PARTS[name]] if name in _PARTS else whole
        into[name.removeprefix("want_")] = value
    return generation_pb2.GenerateRequest(**whole)


async def read(call: Any) -> Any:
    """The next message; None at the end, whatever it is."""
    try:
        response = await call.read()
    except grpc.aio.AioRpcError:
        return None
    return None if response is grpc.aio.EOF else response


async def fold(call: Any, answer: Answer | None = None) -> Answer:
    """Reads a Generate stream to its end."""
    answer = answer or Answer()
    while (response := await read(call)) is not None:
        for event in response.events:
            answer.add(event)
    answer.code = await call.code()
    answer.message = await call.details() or ""
    answer.details = details_of(await call.trailing_metadata())
    return answer


async def read_events(call: Any, wanted: str, answer: Answer, count: int = 1) -> None:
    """Reads a stream until it has said `count` events of a kind."""
    while count > 0:
        response = await read(call)
        assert response is not None, f"ended early: {await call.code()} {await call.details()}"
        for event in response.events:
            answer.add(event)
            count -= event.WhichOneof("kind") == wanted


def details_of(trailers: grpc.aio.Metadata | None) -> list[Message]:
    """The google.rpc details of a failed call."""
    packed = None if trailers is None else trailers.get("grpc-status-details-bin")
    return unpack(status_pb2.Status.FromString(packed)) if isinstance(packed, bytes) else []


def unpack(status: status_pb2.Status) -> list[Message]:
    """The details of a status as messages."""
    kinds: list[type[Message]] = [
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
        error_details_pb2.QuotaFailure,
        error_details_pb2.ResourceInfo,
    ]
    found: list[Message] = []
    for packed in status.details:
        for kind in kinds:
            detail = kind()
            if packed.Unpack(detail):
                found.append(detail)
    return found
