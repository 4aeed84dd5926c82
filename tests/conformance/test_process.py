"""The worker as a process: flags, announcements, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepahead.v1 import worker_pb2, worker_pb2_grpc
from tests.conformance.double import TIMEOUT_S, Scheduler
from tests.e2e.processes import children, is_running
from tests.e2e.stack import eventually
from tests.worker.plans import plan, start

pytestmark = pytest.mark.e2e

MAIN = """
import sys
import stepahead.worker.__main__ as worker
from tests.worker import fakes
worker._make_runner = lambda settings, place: eval(settings.model, vars(fakes))
worker.main()
"""
PATIENT_MAIN = "import stepahead.worker.server as server\nserver.CLOSE_TIMEOUT_S = 3600.0\n" + MAIN
"""Ends only if nothing is waited for."""


class WorkerProcess:
    """A child and what it announced."""

    def __init__(self, process: Process, announced: asyncio.StreamReader) -> None:
        self.process = process
        self._announced = announced

    async def announcement(self) -> dict[str, Any]:
        line = await asyncio.wait_for(self._announced.readline(), TIMEOUT_S)
        return json.loads(line) if line else {"event": "closed"}

    async def announcements(self, last: str) -> list[dict[str, Any]]:
        """Announcements up to the one named `last`."""
        events = [await self.announcement()]
        while events[-1]["event"] not in (last, "closed"):
            events.append(await self.announcement())
        return events

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), TIMEOUT_S)


@asynccontextmanager
async def worker_process(
    model: str, *flags: str, env: dict[str, str] | None = None, main: str = MAIN
) -> AsyncIterator[WorkerProcess]:
    """A worker whose model is a Python expression over the fakes, e.g. `BrokenRunner(2)`."""
    read_fd, write_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", main,
        "--model", model, "--listen", "127.0.0.1:0", "--announce-fd", str(write_fd), *flags,
        pass_fds=[write_fd], stderr=PIPE, env=os.environ | (env or {}),
    )  # fmt: skip
    os.close(write_fd)
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
    )
    try:
        yield WorkerProcess(process, reader)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        transport.close()


@asynccontextmanager
async def session_on(address: str) -> AsyncIterator[Scheduler]:
    async with grpc.aio.insecure_channel(address) as channel:
        scheduler = Scheduler(worker_pb2_grpc.WorkerServiceStub(channel))
        await scheduler.open()
        yield scheduler


async def test_start_up_is_announced_and_sigterm_ends_it_with_zero() -> None:
    flags = ("--max-num-seqs", "2", "--block-size", "8", "--num-kv-blocks", "20")
    async with worker_process("FakeRunner()", *flags, env={"STEPAHEAD_MAX_MODEL_LEN": "24"}) as worker:
        events = await worker.announcements("ready")
        assert [event["event"] for event in events] == ["listening", "progress", "ready"]
        assert events[1] == {"event": "progress", "what": "weights", "done": 10, "total": 10}
        assert events[2] == {
            "event": "ready",
            "model": "fake",
            "device": "cpu",
            "dtype": "int64",
            "num_blocks": 20,
            "kv_groups": "20 blocks",
            "num_concurrent": 6.67,
            "block_size": 8,
            "weight_bytes": 10,
            "stored_weight_bytes": 10,
            "kv_bytes_per_token": 8,
            "kv_cache_bytes": 20 * 8 * 8,
            "max_num_seqs": 2,
            "max_model_len": 24,
        }
        async with session_on(events[0]["address"]) as scheduler:
            worker.process.send_signal(signal.SIGTERM)
            assert (await scheduler.end()).reason == "WORKER_SHUTTING_DOWN"
            assert await worker.exit_code() == 0


async def test_a_crash_of_the_runner_is_told_and_ends_the_process() -> None:
    async with worker_process("BrokenRunner(2)", "--log-format", "json") as worker:
        events = await worker.announcements("ready")
        async with session_on(events[0]["address"]) as scheduler:
            await scheduler.plans(start(1, 0, [1, 2]))
            await scheduler.boundary()
            await scheduler.plans(plan(2, decode=1))
            failed = (await scheduler.read("failed")).failed
            assert (failed.step_id, failed.scope) == (2, worker_pb2.StepFailed.SCOPE_EPOCH)
            assert await worker.exit_code() == 70
        assert worker.process.stderr is not None
        lines = [json.loads(line) for line in (await worker.process.stderr.read()).splitlines()]
        fault = next(line for line in lines if line["event"] == "worker_failed")
        assert fault["step_id"] == 2
        assert fault["incident_id"] in failed.message
        assert fault["exception"][0]["exc_type"] == "ValueError"


async def test_a_hung_device_ends_the_process_all_the_same() -> None:
    async with worker_process("HandClockRunner()", "--max-step", "0.05") as worker:
        events = await worker.announcements("ready")
        async with session_on(events[0]["address"]) as scheduler:
            await scheduler.plans(start(1, 0, [1, 2]))
            assert (await scheduler.read("failed")).failed.step_id == 1
            assert await worker.exit_code() == 70


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_weights_load_ends_it_with_zero_at_once(number: int) -> None:
    """Neither the thread that loads is waited for, nor a stream that a scheduler has open."""
    async with worker_process("StuckLoad()", main=PATIENT_MAIN) as worker:
        address = (await worker.announcement())["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            worker.process.send_signal(number)
            assert await worker.exit_code() == 0


async def test_what_a_load_has_started_ends_with_it() -> None:
    async with worker_process("StuckInCompiler()") as worker:
        await worker.announcements("progress")
        (compiler,) = children(worker.process.pid)
        (its_child,) = children(compiler)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.exit_code() == 0
        await eventually(lambda: not is_running(compiler) and not is_running(its_child))


@pytest.mark.parametrize(
    ("model", "flags", "message", "exit_code"),
    [
        ("make_unloadable()", (), "no such model", 1),
        ("FakeRunner()", ("--max-model-len", "65"), "--max-model-len 65 is more than the 64 positions", 2),
        ("FakeRunner()", ("--num-kv-blocks", "1", "--max-model-len", "32"), "lower --max-model-len", 2),
        ("1 / 0", (), "the model could not be loaded; see the worker's log", 1),
    ],
)
async def test_a_failed_start_says_why_and_whose_fault_it_is(
    model: str, flags: tuple[str, ...], message: str, exit_code: int
) -> None:
    async with worker_process(model, *flags) as worker:
        event = (await worker.announcements("failed"))[-1]
        assert event["event"] == "failed"
        assert message in event["message"]
        assert await worker.exit_code() == exit_code


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-cache-bytes", "2 apples"), "is not a size"),
        (("--listen", "nowhere"), "is not HOST:PORT"),
        (("--max-num-seqs", "0"), "is not in the range"),
        (("--max-model-len", "1", "--threads", "2"), "1 is not in the range 2<=x<="),
        (("--threads", "5000"), "5000 is not in the range 1<=x<=256"),
        (("--num-kv-blocks", "4", "--kv-cache-bytes", "1MiB"), "give one of them"),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "8"), "--max-num-batched-tokens 8 is below"),
    ],
)
async def test_wrong_flags_say_why_and_exit_with_two(flags: tuple[str, ...], message: str) -> None:
    async with worker_process("FakeRunner()", *flags) as worker:
        assert await worker.exit_code() == 2
        assert worker.process.stderr is not None
        text = " ".join((await worker.process.stderr.read()).decode().split())
        assert message in text
