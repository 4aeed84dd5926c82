"""Scheduler and worker as processes: health, drain over SIGTERM, taken ports."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepahead.v1 import generation_pb2_grpc
from tests.e2e.processes import free_port, run, worker_arguments
from tests.e2e.stack import Answer, eventually, fold, read_events, request

pytestmark = pytest.mark.e2e

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Client:
    """Stubs of a scheduler process."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def health(self, service: str = "") -> int:
        response: Any = await self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return response.status

    async def healthy(self, wanted: int) -> None:
        async def is_so() -> bool:
            return await self.health() == wanted

        await eventually(is_so)


async def test_health_goes_through_the_step_loop(tmp_path: Path) -> None:
    """BL-33, O4: no worker, a worker, a worker that is stopped while a request streams, a worker again."""
    port = free_port()
    scheduler_flags = ["--listen", "127.0.0.1:0", "--worker", f"127.0.0.1:{port}"]
    async with (
        run("scheduler", *scheduler_flags, log=tmp_path / "scheduler.log", until="listening") as scheduler,
        grpc.aio.insecure_channel(scheduler.address) as channel,
    ):
        client = Client(channel)
        assert await client.health() == NOT_SERVING
        assert await client.health("stepahead.v1.GenerationService") == NOT_SERVING
        refused = await fold(client.generation.Generate(request([1], 1)))
        assert (refused.code, refused.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        flags = worker_arguments("toy:sleep?ms=20", listen=f"127.0.0.1:{port}", resume_grace_s=60)
        async with run("worker", *flags, log=tmp_path / "worker.log") as worker:
            assert (await scheduler.announced("ready"))["workers"] == 1
            await client.healthy(SERVING)
            assert await client.health("stepahead.v1.GenerationService") == SERVING
            call = client.generation.Generate(request([1, 2], 100), timeout=60)
            answer = Answer()
            await read_events(call, "delta", answer)
            worker.send_signal(signal.SIGSTOP)
            await client.healthy(NOT_SERVING)
            worker.send_signal(signal.SIGCONT)
            await client.healthy(SERVING)
            await fold(call, answer)
            assert (answer.ok, len(answer.token_ids)) == (True, 100)


async def test_sigterm_drains(tmp_path: Path) -> None:
    """O6: running requests end, new ones are told, the process exits 0."""
    async with run("worker", *worker_arguments("toy:sleep?ms=10"), log=tmp_path / "worker.log") as worker:
        flags = ["--listen", "127.0.0.1:0", "--worker", worker.address]
        async with (
            run("scheduler", *flags, log=tmp_path / "scheduler.log") as scheduler,
            grpc.aio.insecure_channel(scheduler.address) as channel,
        ):
            client = Client(channel)
            call = client.generation.Generate(request([1, 2], 250), timeout=60)
            answer = Answer()
            await read_events(call, "delta", answer)
            scheduler.send_signal(signal.SIGTERM)
            await client.healthy(NOT_SERVING)
            refused = await fold(client.generation.Generate(request([1], 1), timeout=60))
            assert (refused.code, refused.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            await fold(call, answer)
            assert (answer.ok, len(answer.token_ids)) == (True, 250)
            assert await scheduler.wait() == 0
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
        assert "session_closed" in worker.log


async def test_a_drain_that_takes_too_long_cancels_what_is_left(tmp_path: Path) -> None:
    async with run("worker", *worker_arguments("toy:sleep?ms=20"), log=tmp_path / "worker.log") as worker:
        flags = ["--listen", "127.0.0.1:0", "--worker", worker.address, "--drain-timeout", "0.1"]
        async with (
            run("scheduler", *flags, log=tmp_path / "scheduler.log") as scheduler,
            grpc.aio.insecure_channel(scheduler.address) as channel,
        ):
            call = Client(channel).generation.Generate(request([1, 2], 500), timeout=60)
            answer = Answer()
            await read_events(call, "delta", answer)
            scheduler.send_signal(signal.SIGINT)
            await fold(call, answer)
            assert (answer.code, answer.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert await scheduler.wait() == 1
    assert "1 request(s) did not finish in time" in (tmp_path / "scheduler.log").read_text()


@pytest.mark.parametrize("has_worker", [True, False])
async def test_a_second_signal_ends_the_drain(tmp_path: Path, *, has_worker: bool) -> None:
    """O6: whoever runs is told, whether a worker could still finish it or not."""
    async with run("worker", *worker_arguments("toy:sleep?ms=20"), log=tmp_path / "worker.log") as worker:
        flags = ["--listen", "127.0.0.1:0", "--worker", worker.address, "--drain-timeout", "3600"]
        async with (
            run("scheduler", *flags, log=tmp_path / "scheduler.log") as scheduler,
            grpc.aio.insecure_channel(scheduler.address) as channel,
        ):
            client = Client(channel)
            call = client.generation.Generate(request([1, 2], 500), timeout=60)
            answer = Answer()
            await read_events(call, "delta", answer)
            if not has_worker:
                await worker.kill()
            scheduler.send_signal(signal.SIGTERM)
            await client.healthy(NOT_SERVING)
            await eventually(lambda: "draining" in scheduler.log)
            scheduler.send_signal(signal.SIGINT)
            await fold(call, answer)
            assert (answer.code, answer.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert await scheduler.wait() == 0


@pytest.mark.parametrize("service", ["scheduler", "worker"])
async def test_a_taken_port_is_named(service: str, tmp_path: Path) -> None:
    """A second server must fail, not steal connections."""
    taken = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{taken.sockets[0].getsockname()[1]}"
    flags = ["--worker", "127.0.0.1:1"] if service == "scheduler" else ["--model", "toy:tagged"]
    async with run(service, "--listen", address, *flags, log=tmp_path / "log", until="failed") as process:
        assert await process.wait() == 1
        assert address in process.log
        assert "Traceback" not in process.log
    taken.close()
