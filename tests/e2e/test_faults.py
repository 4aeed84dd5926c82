"""Workers die, come back or never do; networks break. Clients see a pause, no lost or repeated token."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from stepahead.scheduler import worker_link
from stepahead.worker.runner import StepBatch
from tests.e2e.flaky_network import flaky
from tests.e2e.processes import free_port, run, worker_arguments
from tests.e2e.stack import Answer, Stack, eventually, fold, read_events, request, serve_scheduler, serve_worker
from tests.e2e.tagged_oracle import expected

pytestmark = pytest.mark.e2e

MODEL = "toy:tagged"


def long_requests(count: int, max_tokens: int) -> list[Any]:
    """Greedy and seeded requests, all different."""
    return [
        request([index, 7], max_tokens, request_id=f"r{index}", temperature=float(index % 2), seed=index)
        for index in range(count)
    ]


async def begun(stack: Stack, messages: list[Any]) -> list[tuple[Any, Answer]]:
    """The calls, each with some tokens read."""
    calls = [(stack.open(message), Answer()) for message in messages]
    await asyncio.gather(*(read_events(call, "delta", answer, count=2) for call, answer in calls))
    return calls


async def assert_as_undisturbed(calls: list[tuple[Any, Answer]], messages: list[Any]) -> None:
    answers = await asyncio.gather(*(fold(call, answer) for call, answer in calls))
    for answer, message in zip(answers, messages, strict=True):
        assert answer.ok, answer
        assert answer.token_ids == expected(message)


async def test_a_killed_worker_leaves_its_requests_to_the_other_lane(tmp_path: Path) -> None:
    """O1, G3, G7: kill -9 in mid-stream."""
    messages = long_requests(8, 400)
    async with (
        run("worker", *worker_arguments(MODEL), log=tmp_path / "first.log") as first,
        run("worker", *worker_arguments(MODEL), log=tmp_path / "second.log") as second,
        serve_scheduler(first.address, second.address) as stack,
    ):
        await eventually(lambda: len(stack.server.engine.links) == 2)
        calls = await begun(stack, messages)
        assert [worker.num_running for worker in (await stack.status()).workers] == [4, 4]
        await first.kill()
        await assert_as_undisturbed(calls, messages)
        status = await stack.status()
        assert [worker.connected for worker in status.workers] == [False, True]
        assert status.totals.preemptions >= 4
        assert status.totals.requests_finished == 8


async def test_the_only_worker_is_killed_and_comes_back(tmp_path: Path) -> None:
    """O1, O2."""
    messages = long_requests(4, 400)
    flags = worker_arguments(MODEL, listen=f"127.0.0.1:{free_port()}")
    async with run("worker", *flags, log=tmp_path / "first.log") as first, serve_scheduler(first.address) as stack:
        await eventually(lambda: bool(stack.server.engine.links))
        calls = await begun(stack, messages)
        await first.kill()
        async with run("worker", *flags, log=tmp_path / "second.log"):
            await assert_as_undisturbed(calls, messages)
            await stack.assert_quiescent()


async def test_the_only_worker_never_comes_back(tmp_path: Path) -> None:
    """O1: nothing hangs, and the status invites another try."""
    async with (
        run("worker", *worker_arguments(MODEL), log=tmp_path / "worker.log") as worker,
        serve_scheduler(worker.address, lane_wait_s=0.2, worker_wait_s=0.0) as stack,
    ):
        await eventually(lambda: bool(stack.server.engine.links))
        calls = await begun(stack, long_requests(3, 400))
        await worker.kill()
        for call, answer in calls:
            await fold(call, answer)
            assert (answer.code, answer.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
            assert answer.reason == "ERROR"
        refused = await stack.generate([1], 1)
        assert (refused.code, refused.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        assert not stack.server.engine.book.requests
        assert (await stack.status()).totals.requests_failed == 3


@pytest.mark.parametrize("delay_s", [0.0, 0.005])
@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_network_that_breaks_all_the_time(depth: int, delay_s: float) -> None:
    """Rule 7, B1, B11: the session resumes, no step runs twice, no token is lost or repeated."""
    messages = long_requests(6, 120)
    step_ids: list[int] = []

    def note(batch: StepBatch) -> None:
        step_ids.append(batch.step_id)

    async with (
        serve_worker(MODEL, step_s=0.004, on_forward=note) as worker,
        flaky(worker.address) as (proxy, address),
        serve_scheduler(address, overlap_depth=depth) as stack,
    ):
        await eventually(lambda: bool(stack.server.engine.links))
        calls = await begun(stack, messages)
        proxy.delay_s = delay_s

        async def disturb() -> None:
            rng = random.Random(5)
            while True:
                await asyncio.sleep(0.1)
                await asyncio.sleep(rng.random() * 0.01)
                proxy.reset()

        disturbing = asyncio.create_task(disturb())
        await assert_as_undisturbed(calls, messages)
        disturbing.cancel()
        await eventually(lambda: stack.server.cluster.links[0].state.value == "open")
        (status,) = (await stack.status()).workers
        assert status.steps.resumes > 0
        assert status.worker_epoch == 1, "the session was never lost"
        assert proxy.num_resets > 1
        await stack.assert_quiescent()
    assert step_ids == list(range(1, len(step_ids) + 1)), "every step exactly once, in order"


async def test_a_network_that_is_gone_for_too_long_costs_the_lane() -> None:
    """The worker forgets the session; the scheduler starts over with the whole history."""
    messages = long_requests(4, 200)
    async with (
        serve_worker(MODEL, step_s=0.002, resume_grace_ns=300_000_000) as worker,
        flaky(worker.address) as (proxy, address),
        serve_scheduler(address) as stack,
    ):
        await eventually(lambda: bool(stack.server.engine.links))
        calls = await begun(stack, messages)
        proxy.is_open = False
        proxy.reset()
        await eventually(lambda: not stack.server.engine.links)
        proxy.is_open = True
        await assert_as_undisturbed(calls, messages)
        (status,) = (await stack.status()).workers
        assert status.worker_epoch == 2
        await stack.assert_quiescent()


async def test_two_workers_share_the_requests() -> None:
    """16 requests, two lanes."""
    messages = long_requests(16, 60)
    async with (
        serve_worker(MODEL, step_s=0.002) as first,
        serve_worker(MODEL, step_s=0.002) as second,
        serve_scheduler(first.address, second.address) as stack,
    ):
        await eventually(lambda: len(stack.server.engine.links) == 2)
        calls = [(stack.open(message), Answer()) for message in messages]
        await asyncio.gather(*(read_events(call, "delta", answer) for call, answer in calls))
        assert [worker.num_running for worker in (await stack.status()).workers] == [8, 8]
        await assert_as_undisturbed(calls, messages)
        status = await stack.status()
        assert all(worker.steps.boundaries > 50 for worker in status.workers)
        assert status.totals.preemptions == 0
        await stack.assert_quiescent()


async def test_a_worker_of_another_model_is_refused_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """The first worker to answer decides what is served; the other one serves nothing here."""
    logged: list[str] = []

    def is_refused() -> bool:
        logged.append(capsys.readouterr().out)
        return "worker refused" in "".join(logged)

    async with (
        serve_worker(MODEL) as first,
        serve_worker("toy:running-sum") as second,
        serve_scheduler(first.address, second.address) as stack,
    ):
        await eventually(is_refused)
        await eventually(lambda: bool(stack.server.engine.links))
        assert (await stack.generate([1, 2], 20)).ok
        assert sorted(worker.connected for worker in (await stack.status()).workers) == [False, True]
        refusal = next(line for line in "".join(logged).splitlines() if "worker refused" in line)
        assert "toy:tagged" in refusal
        assert "toy:running-sum" in refusal


async def test_a_stopped_worker_leaves_its_requests_to_the_other_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BL-33, O1: it accepts connections and says nothing; when it wakes up its old session is void (O2)."""
    monkeypatch.setattr(worker_link, "PONG_TIMEOUT_S", 1.0)
    monkeypatch.setattr(worker_link, "OPEN_TIMEOUT_S", 0.3)
    messages = long_requests(8, 400)
    async with (
        run("worker", *worker_arguments(MODEL), log=tmp_path / "first.log") as first,
        run("worker", *worker_arguments(MODEL), log=tmp_path / "second.log") as second,
        serve_scheduler(first.address, second.address) as stack,
    ):
        await eventually(lambda: len(stack.server.engine.links) == 2)
        calls = await begun(stack, messages)
        first.send_signal(signal.SIGSTOP)
        await assert_as_undisturbed(calls, messages)
        assert [worker.connected for worker in (await stack.status()).workers] == [False, True]
        first.send_signal(signal.SIGCONT)
        await eventually(lambda: len(stack.server.engine.links) == 2)
        calls = await begun(stack, messages)
        await assert_as_undisturbed(calls, messages)
        assert (await stack.status()).workers[0].worker_epoch == 2
        await stack.assert_quiescent()
