"""A worker that a test plays by hand: it answers a scheduler's streams message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from typing_extensions import override

from stepahead.v1 import worker_pb2, worker_pb2_grpc

TIMEOUT_S = 20.0
GRACE_NS = 10_000_000_000


def worker_info(*, model: dict[str, Any] | None = None, **limits: Any) -> worker_pb2.GetWorkerInfoResponse:
    """What the worker says about itself: four sequences, blocks of four tokens, no tokenizer."""
    facts: dict[str, Any] = {"name": "scripted", "fingerprint": "s" * 64, "vocab_size": 100, "dtype": "int64"}
    sizes: dict[str, Any] = {
        "max_num_seqs": 4,
        "num_slots": 12,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "num_blocks": 64,
        "block_size": 4,
        "max_overlap_depth": 2,
    }
    return worker_pb2.GetWorkerInfoResponse(
        protocol_major=1,
        protocol_minor=1,
        worker_instance_id="scripted-worker",
        model=worker_pb2.WorkerModel(**(facts | (model or {}))),
        limits=worker_pb2.WorkerLimits(**(sizes | limits)),
        device="paper",
    )


class ScriptedStream:
    """One RunSteps stream, seen from the worker."""

    def __init__(self, context: Any, *, answers_pings: bool) -> None:
        self.answers_pings = answers_pings
        self.running_step_age_ns = 0
        self.commands: asyncio.Queue[worker_pb2.RunStepsRequest | None] = asyncio.Queue()
        self.members: list[int] = []
        """Incarnations in the decode set, by joining order."""
        self.ended: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()
        self._context = context
        self._incarnations: dict[int, int] = {}
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Reads the scheduler's side; the stream ends when it has closed its side or `end` is called."""
        reader = asyncio.create_task(self._read())
        await self.ended
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        code, text = self.ended.result()
        if code is not grpc.StatusCode.OK:
            await self._context.abort(code, text)

    async def _read(self) -> None:
        while True:
            message = await self._context.read()
            if not isinstance(message, worker_pb2.RunStepsRequest):
                break
            if message.HasField("close"):
                self.end(grpc.StatusCode.OK)
            if not message.HasField("ping"):
                self.commands.put_nowait(message)
            elif self.answers_pings:
                await self.send(pong=self._pong(message.ping.nonce))
        self.commands.put_nowait(None)
        self.end(grpc.StatusCode.OK)

    def _pong(self, nonce: int) -> worker_pb2.Pong:
        return worker_pb2.Pong(
            nonce=nonce,
            waiting=worker_pb2.Pong.WAITING_COMMAND,
            running_step_age_ns=self.running_step_age_ns,
        )

    def end(self, code: grpc.StatusCode, text: str = "") -> None:
        """Ends the stream with a status."""
        if not self.ended.done():
            self.ended.set_result((code, text))

    async def send(self, **event: Any) -> None:
        """Sends one event: opened=, boundary=, rejected=, failed= or pong=."""
        async with self._writing:
            await self._context.write(worker_pb2.RunStepsResponse(**event))

    async def command(self, kind: str) -> Any:
        """The next command, which must be of that kind."""
        message = await asyncio.wait_for(self.commands.get(), TIMEOUT_S)
        assert message is not None, "the scheduler closed its side"
        assert message.WhichOneof("command") == kind, message
        return getattr(message, kind)

    async def plan(self) -> worker_pb2.StepPlan:
        """The next plan."""
        return await self.command("plan")

    def rows(self, plan: worker_pb2.StepPlan) -> list[int]:
        """The incarnations of a plan's rows in order. Call it once per plan, in order."""
        for slot in (*plan.released_slots, *plan.left_slots):
            incarnation = self._incarnations.get(slot, 0)
            self.members = [member for member in self.members if member != incarnation]
        for admission in plan.admissions:
            self._incarnations[admission.slot] = admission.incarnation
        self.members += [self._incarnations[slot] for slot in plan.joined_slots]
        explicit = [self._incarnations[slot] for slot in plan.row_slots]
        resting = {self._incarnations[slot] for slot in (*plan.sit_out_slots, *plan.row_slots)}
        rows = explicit + [member for member in self.members if member not in resting]
        assert len(rows) == plan.total_rows
        return rows

    async def complete(
        self,
        plan: worker_pb2.StepPlan,
        rows: Sequence[int],
        token_ids: Sequence[int],
        *,
        token_counts: Sequence[int] = (),
        errors: Sequence[worker_pb2.RowError] = (),
        epoch: int = 1,
    ) -> None:
        """Sends the boundary of a plan."""
        completion = worker_pb2.StepCompletion(
            slots=[0] * len(rows),
            incarnations=rows,
            token_counts=token_counts,
            token_ids=token_ids,
            row_errors=errors,
        )
        boundary = worker_pb2.StepBoundary(
            worker_epoch=epoch, completed_step_id=plan.step_id, completion=completion
        )
        await self.send(boundary=boundary)

    async def step(self, token_id: int, *, epoch: int = 1) -> worker_pb2.StepPlan:
        """Takes the next plan, which has one sampling row, and completes it with a token."""
        plan = await self.plan()
        await self.complete(plan, self.rows(plan), [token_id], epoch=epoch)
        return plan


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """The servicer: every stream a scheduler opens comes out of `streams`."""

    def __init__(self, info: worker_pb2.GetWorkerInfoResponse) -> None:
        self.info = info
        self.bundle: list[worker_pb2.GetTokenizerBundleResponse] = []
        self.is_loading = False
        self.answers_pings = True
        self.num_info_calls = 0
        self.streams: asyncio.Queue[ScriptedStream] = asyncio.Queue()
        self.all_streams: list[ScriptedStream] = []

    @override
    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:
        self.num_info_calls += 1
        if self.is_loading:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "loading")
        return self.info

    @override
    async def GetTokenizerBundle(
        self, request: Any, context: Any
    ) -> AsyncIterator[worker_pb2.GetTokenizerBundleResponse]:
        for chunk in self.bundle:
            yield chunk

    @override
    async def RunSteps(  # pyright: ignore[reportIncompatibleMethodOverride] - writes instead of yielding
        self, request_iterator: Any, context: Any
    ) -> None:
        stream = ScriptedStream(context, answers_pings=self.answers_pings)
        self.all_streams.append(stream)
        self.streams.put_nowait(stream)
        await stream.run()

    async def accept(self) -> tuple[ScriptedStream, worker_pb2.OpenSession]:
        """The next stream and its first message, not answered yet."""
        stream = await asyncio.wait_for(self.streams.get(), TIMEOUT_S)
        return stream, await stream.command("open")

    async def open(self, *, epoch: int = 1, **fields: Any) -> tuple[ScriptedStream, worker_pb2.OpenSession]:
        """Accepts the next stream and opens its session."""
        stream, message = await self.accept()
        await stream.send(
            opened=worker_pb2.SessionOpened(
                **(
                    {
                        "session_id": 70 + epoch,
                        "worker_instance_id": "scripted-worker",
                        "worker_epoch": epoch,
                        "overlap_depth": message.overlap_depth,
                        "resume_grace_ns": GRACE_NS,
                    }
                    | fields
                )
            )
        )
        return stream, message


@asynccontextmanager
async def serve_script(
    info: worker_pb2.GetWorkerInfoResponse | None = None,
) -> AsyncIterator[tuple[ScriptedWorker, str]]:
    """A scripted worker and its address."""
    worker = ScriptedWorker(info or worker_info())
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield worker, f"127.0.0.1:{port}"
    finally:
        for stream in worker.all_streams:
            stream.end(grpc.StatusCode.OK)
        await server.stop(None)
