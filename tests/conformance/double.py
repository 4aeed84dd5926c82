"""A worker on a loopback port, and a scheduler that sends exactly what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from stepahead.v1 import worker_pb2, worker_pb2_grpc
from stepahead.worker.announce import Announcer
from stepahead.worker.runner import Runner
from stepahead.worker.server import WorkerServer
from stepahead.worker.settings import WorkerSettings

TIMEOUT_S = 20.0


def settings(**fields: Any) -> WorkerSettings:
    """Small limits: three sequences of sixteen tokens, blocks of four, D up to 2."""
    defaults: dict[str, Any] = {
        "model": "fake",
        "host": "127.0.0.1",
        "port": 0,
        "dtype": "auto",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 8,
        "max_model_len": 16,
        "block_size": 4,
        "num_kv_blocks": 32,
        "kv_cache_bytes": None,
        "max_overlap_depth": 2,
        "threads": None,
        "resume_grace_ns": 10_000_000_000,
        "max_step_ns": 60_000_000_000,
        "hold_events": False,
        "reflection": None,
        "log_format": "console",
        "announce_fd": None,
    }
    return WorkerSettings(**(defaults | fields))


@asynccontextmanager
async def serve(
    make_runner: Callable[[], Runner], *, release: Callable[[], None] | None = None, **fields: Any
) -> AsyncIterator[WorkerServer]:
    """A loaded worker.

    Args:
        make_runner: called on the device thread.
        release: frees a device that stands still, so that its thread can end.
        fields: of the settings.
    """
    server = WorkerServer(settings(**fields), make_runner, Announcer(None))
    await server.listen()
    try:
        await server.load()
        yield server
    finally:
        if release is not None:
            release()
        await server.close()


class StreamEnded(Exception):
    """The worker has ended the stream."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason} {message}")
        self.code = code
        self.reason = reason
        self.message = message

    @property
    def is_hidden(self) -> bool:
        """Whether the worker's status was lost: grpc.aio gives a call its own if a write to it fails first."""
        return self.code is grpc.StatusCode.INTERNAL and self.message == "Internal error from Core"


class Scheduler:
    """One RunSteps stream."""

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        self.stub = stub
        self.opened = worker_pb2.SessionOpened()
        self._call = stub.RunSteps()

    async def send(self, **command: Any) -> None:
        """Sends one command: open=, plan=, gate=, drain=, ping= or close=."""
        await self._call.write(worker_pb2.RunStepsRequest(**command))

    async def open(self, **fields: Any) -> worker_pb2.SessionOpened:
        """Opens a session and reads the answer."""
        await self.send_open(**fields)
        self.opened = (await self.read("opened")).opened
        return self.opened

    async def send_open(self, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "protocol_major": 1,
            "scheduler_instance_id": "scheduler-a",
            "scheduler_epoch": 1,
            "overlap_depth": 1,
            "stream_generation": 1,
        }
        await self.send_late(open=worker_pb2.OpenSession(**(defaults | fields)))  # it may be refused unread

    async def plans(self, *plans: worker_pb2.StepPlan) -> None:
        """Sends plans, one after another."""
        for plan in plans:
            await self.send(plan=plan)

    async def send_late(self, **command: Any) -> None:
        """Sends a command on a stream that the worker may have ended already."""
        try:
            await self.send(**command)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def send_raw(self, payload: bytes) -> None:
        """Sends a message given by its bytes."""
        await self._call.write(worker_pb2.RunStepsRequest.FromString(payload))

    async def read_or_end(self) -> worker_pb2.RunStepsResponse | None:
        """The next message, or None if the stream has ended."""
        return await asyncio.wait_for(self._read_to_end(), TIMEOUT_S)

    async def read(self, event: str) -> worker_pb2.RunStepsResponse:
        """The next message, which must be of that kind."""
        message = await self.read_any()
        assert message.WhichOneof("event") == event, message
        return message

    async def read_any(self) -> worker_pb2.RunStepsResponse:
        """The next message."""
        message = await asyncio.wait_for(self._call.read(), TIMEOUT_S)
        if message is grpc.aio.EOF:
            raise await self._ended()
        return message

    async def boundary(self) -> worker_pb2.StepBoundary:
        return (await self.read("boundary")).boundary

    async def rejected(self) -> worker_pb2.StepRejected:
        return (await self.read("rejected")).rejected

    async def ping(self, nonce: int = 1) -> worker_pb2.Pong:
        await self.send(ping=worker_pb2.Ping(nonce=nonce))
        return (await self.read("pong")).pong

    async def end(self) -> StreamEnded:
        """How the stream ends; nothing may come before that."""
        message = await self.read_or_end()
        assert message is None, message
        return await self._ended()

    def cancel(self) -> None:
        """Breaks the stream."""
        self._call.cancel()

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def _read_to_end(self) -> worker_pb2.RunStepsResponse | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError:
            return None
        return None if message is grpc.aio.EOF else message

    async def _ended(self) -> StreamEnded:
        code = await self._call.code()
        return StreamEnded(code, reason_of(await self._call.trailing_metadata()), await self._call.details() or "")


def reason_of(trailers: grpc.aio.Metadata | None) -> str:
    """The ErrorInfo reason in a call's trailers; empty if there is none."""
    packed = None if trailers is None else trailers.get("grpc-status-details-bin")
    if not isinstance(packed, bytes):
        return ""
    for detail in status_pb2.Status.FromString(packed).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info.reason
    return ""


@asynccontextmanager
async def connect(server: WorkerServer) -> AsyncIterator[worker_pb2_grpc.WorkerServiceAsyncStub]:
    """A stub of the worker."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)
