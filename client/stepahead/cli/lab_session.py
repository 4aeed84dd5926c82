"""What the experiments share: requests whose steps end when told, and the steps as they were recorded.

Nothing here is computed twice: what a table shows was read from the plans and boundaries that went over the wire
(`--record-steps`), and a step that is held ends by a flush (`FlushSteps`), never by a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepahead.cli.failures import StackError
from stepahead.cli.local_services import passing_log_dir, require_extras
from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView
from stepahead.client.channel import open_aio_channel
from stepahead.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc, worker_pb2

_T = TypeVar("_T")

POLL_INTERVAL_S = 0.01
CALL_TIMEOUT_S = 30.0

# More flushes than any experiment has steps: a lab that needs more is broken, and must say so instead of going on.
MAX_FLUSHES = 100


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One row of a step: positions [first_position, first_position + num_fed) of a request were fed."""

    incarnation: int
    slot: int
    prompt: tuple[int, ...]
    """Of the request; the experiments tell their requests apart by it."""
    history: tuple[int, ...]
    """Prompt and outputs at the row's admission."""
    first_position: int
    num_fed: int
    token_id: int | None
    """What the row sampled, if anything."""
    num_additions: int
    inputs: tuple[int, ...]
    """What the model then had in its cache to choose from; see RowTrace."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A plan and its boundary."""

    step_id: int
    settled_in_place: bool
    running_step_id: int
    rows: tuple[RecordedRow, ...]


class Reply:
    """A request under way: its tokens so far, and its end."""

    def __init__(self, call: AsyncIterator[generation_pb2.GenerateResponse]) -> None:
        self.token_ids: list[int] = []
        self._reading = asyncio.create_task(self._read(call))

    async def _read(self, call: AsyncIterator[generation_pb2.GenerateResponse]) -> None:
        async for response in call:
            for event in response.events:
                self.token_ids += event.delta.token_ids

    @property
    def ended(self) -> bool:
        """Whether the stream has ended."""
        return self._reading.done()

    async def tokens(self) -> tuple[int, ...]:
        """All tokens, once the request has ended. Raises grpc.RpcError if it failed."""
        await self._reading
        return tuple(self.token_ids)

    def leave(self) -> None:
        """Stops reading, which cancels the request."""
        self._reading.cancel()


class LabSession:
    """Requests to one scheduler, and the recorded steps of its first worker. See `lab_session`."""

    def __init__(self, address: str) -> None:
        self._channel = open_aio_channel(address)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._operations = operations_pb2_grpc.OperationsServiceStub(self._channel)
        self._replies: list[Reply] = []

    async def close(self) -> None:
        """Leaves every request."""
        for reply in self._replies:
            reply.leave()
        await self._channel.close()

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        """Sends a greedy request; returns once the scheduler has accepted it. Raises StackError if it refuses."""
        message = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIdsInput(ids=prompt),
            sampling=generation_pb2.SamplingParams(temperature=0.0),
            stopping=generation_pb2.StoppingParams(max_tokens=max_tokens),
            output=generation_pb2.OutputParams(text=False, token_ids=True),
        )
        call = self._generation.Generate(message, timeout=CALL_TIMEOUT_S)
        await call.initial_metadata()
        if call.done() and await call.code() is not grpc.StatusCode.OK:
            raise StackError(f"the scheduler refused a request: {await call.details()}")
        self._replies.append(Reply(aiter(call)))
        return self._replies[-1]

    async def flush(self) -> int:
        """Lets every held step end; returns how many boundaries came of it."""
        request = operations_pb2.FlushStepsRequest()
        return (await self._operations.FlushSteps(request, timeout=CALL_TIMEOUT_S)).num_boundaries

    async def flush_all(self) -> None:
        """Ends held steps one after the other until nothing is in flight."""
        for _ in range(MAX_FLUSHES):
            if not await self.flush():
                return
        raise StackError(f"the experiment did not end within {MAX_FLUSHES} steps")

    async def status(self) -> operations_pb2.GetStatusResponse:
        """The scheduler's status."""
        return await self._operations.GetStatus(operations_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)

    async def until(
        self, condition: Callable[[operations_pb2.GetStatusResponse], bool]
    ) -> operations_pb2.GetStatusResponse:
        """Polls until the status fulfils the condition."""
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while True:
                status = await self.status()
                if condition(status):
                    return status
                await asyncio.sleep(POLL_INTERVAL_S)

    async def steps(self) -> list[RecordedStep]:
        """Every committed step so far."""
        request = operations_pb2.GetTimelineRequest(limit=1000)
        timeline = await self._operations.GetTimeline(request, timeout=CALL_TIMEOUT_S)
        return read_steps(timeline.records)


def read_steps(records: Sequence[operations_pb2.StepRecord]) -> list[RecordedStep]:
    """Recorded messages to rows. Raises StackError if the scheduler does not record."""
    admissions: dict[int, worker_pb2.SlotAdmission] = {}
    next_positions: dict[int, int] = {}
    steps: list[RecordedStep] = []
    for record in records:
        if not record.HasField("plan") or not record.HasField("boundary"):
            raise StackError("the scheduler keeps no plans and boundaries: it needs --record-steps")
        for admission in record.plan.admissions:
            admissions[admission.incarnation] = admission
            next_positions[admission.incarnation] = admission.num_settled_tokens
        steps.append(_read_step(record, admissions, next_positions))
    return steps


def _read_step(
    record: operations_pb2.StepRecord,
    admissions: Mapping[int, worker_pb2.SlotAdmission],
    next_positions: dict[int, int],
) -> RecordedStep:
    completion = record.boundary.completion
    fed = dict(zip(record.plan.row_slots, record.plan.row_counts, strict=True))
    counts = completion.token_counts or [1] * len(completion.slots)
    tokens = iter(completion.token_ids)
    traces = {trace.incarnation: trace for trace in completion.row_traces}
    rows: list[RecordedRow] = []
    for slot, incarnation, count in zip(completion.slots, completion.incarnations, counts, strict=True):
        admission = admissions[incarnation]
        trace = traces.get(incarnation, worker_pb2.RowTrace())
        first_position, num_fed = next_positions[incarnation], fed.get(slot, 1)
        next_positions[incarnation] = first_position + num_fed
        rows.append(
            RecordedRow(
                incarnation=incarnation,
                slot=slot,
                prompt=tuple(admission.token_ids[: admission.num_prompt_tokens]),
                history=tuple(admission.token_ids),
                first_position=first_position,
                num_fed=num_fed,
                token_id=next(tokens) if count else None,
                num_additions=trace.num_additions,
                inputs=tuple(trace.inputs),
            )
        )
    return RecordedStep(
        step_id=record.completed_step_id,
        settled_in_place=record.plan.settle == worker_pb2.SETTLE_MODE_COMPLETE_IN_PLACE,
        running_step_id=record.running_step_id,
        rows=tuple(rows),
    )


@asynccontextmanager
async def lab_session(address: str) -> AsyncGenerator[LabSession]:
    """A session that leaves its requests at the end."""
    session = LabSession(address)
    try:
        yield session
    finally:
        await session.close()


def run_experiment(play: Callable[[Path | None], Coroutine[Any, Any, _T]], *, verbose: bool) -> _T:
    """What `play` returns, given the folder for the services' logs (None: stderr), which stays only if it fails."""
    require_extras("scheduler", "worker")
    with passing_log_dir(verbose=verbose) as log_dir:
        return asyncio.run(play(log_dir))


async def on_stack(options: StackOptions, play: Callable[[str], Awaitable[_T]], log_dir: Path | None) -> _T:
    """Starts a scheduler and a worker, plays with the scheduler's address, stops them."""

    async def body(ready: StackReady) -> _T:
        return await play(ready.address)

    with ConsoleView(Console(stderr=True, quiet=True)) as view:
        return await run_stack(Stack(options, view, log_dir=log_dir), body)


def show_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Lines of a name and a text."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text in facts:
        rows.add_row(name, Text(text))
    console.print(rows)


def on_paper(*, agrees: bool) -> str:
    """How the last line of an experiment reads."""
    return "the same" if agrees else "SOMETHING ELSE"
