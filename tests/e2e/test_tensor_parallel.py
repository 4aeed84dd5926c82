"""A worker of two processes behind a scheduler: the same tokens as one; and whichever dies, both end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stepahead.worker.ranks.followers import Followers
from tests.e2e.processes import Process, children, free_port, is_running, run
from tests.e2e.stack import BOUND_S, Answer, eventually, fold, read_events, request, serve_scheduler, serve_worker

pytestmark = pytest.mark.e2e


def rank_arguments(model: Path, *more: str) -> list[str]:
    """Flags of a small worker of two ranks."""
    return [
        *("--model", str(model), "--listen", "127.0.0.1:0", "--dtype", "float32", "--tensor-parallel-size", "2"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--block-size", "4"),
        *("--num-kv-blocks", "512", "--max-model-len", "256", *more),
    ]


def mixed_requests(max_tokens: int) -> list[Any]:
    """Greedy and seeded, short and long, with penalties and log probabilities, all at once."""
    sampling: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "top_p": 0.9, "seed": 6},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "seed": 7},
        {"frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 8, "repetition_penalty": 1.2},
    ]
    return [
        request(list(range(40, 44 + 9 * index)), max_tokens, ignore_eos=True, **options)
        for index, options in enumerate(sampling)
    ]


async def test_two_ranks_answer_as_one_and_end_together(byte_model: Path, tmp_path: Path) -> None:
    """O1, O5: the follower is killed while requests stream; they go on at another worker with the same tokens."""
    messages, long_messages = mixed_requests(24), mixed_requests(150)
    async with (
        run("worker", *rank_arguments(byte_model), log=tmp_path / "ranks.log") as ranks,
        serve_worker(str(byte_model), dtype="float32") as single,
    ):
        async with serve_scheduler(single.address) as stack:
            await eventually(lambda: bool(stack.server.engine.links))
            expected = await stack.answers(messages)
            expected_long = await stack.answers(long_messages)
        async with serve_scheduler(ranks.address) as stack:
            await eventually(lambda: bool(stack.server.engine.links))
            answers = await stack.answers(messages)
            assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
            assert all(each.ok for each in answers)
            assert [worker.device for worker in (await stack.status()).workers] == ["cpu x2"]
        async with serve_scheduler(ranks.address, single.address) as stack:
            await eventually(lambda: len(stack.server.engine.links) == 2)
            calls = [(stack.open(message), Answer()) for message in long_messages]
            await asyncio.gather(*(read_events(call, "delta", answer, count=2) for call, answer in calls))
            (follower,) = children(ranks.popen.pid)
            os.kill(follower, signal.SIGKILL)
            assert await ranks.wait() == 70
            await asyncio.gather(*(fold(call, answer) for call, answer in calls))
            assert [answer.token_ids for _, answer in calls] == [each.token_ids for each in expected_long]
            assert [worker.connected for worker in (await stack.status()).workers] == [False, True]
        assert "RankLost" in ranks.log
        assert "worker_failed" in ranks.log


def orchestrated(rank: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


async def test_a_rank_that_hangs_is_found_by_the_step_watchdog(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O4, O5, with ranks that an orchestrator starts: a stopped one makes a step too long, and rank 0 ends.

    Nobody holds the other one's hand: it ends when it sees that rank 0 is gone.
    """
    arguments, port = rank_arguments(byte_model, "--max-step", "1"), free_port()
    for name, value in orchestrated(0, port).items():
        monkeypatch.setenv(name, value)
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stepahead.worker", *arguments), env={**os.environ, **orchestrated(1, port)}
    )
    try:
        async with (
            run("worker", *arguments, log=tmp_path / "log") as ranks,
            serve_scheduler(ranks.address, lane_wait_s=0.2) as stack,
        ):
            assert children(ranks.popen.pid) == []
            await eventually(lambda: bool(stack.server.engine.links))
            other.send_signal(signal.SIGSTOP)
            answer = await stack.generate([1, 2], 3)
            assert answer.error_info.reason == "WORKER_LOST"
            assert await ranks.wait() == 70
            assert "StepTimeout" in ranks.log
            other.send_signal(signal.SIGCONT)
            assert await asyncio.wait_for(other.wait(), BOUND_S) == 70
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()


async def test_a_rank_that_is_stopped_is_ended_all_the_same() -> None:
    """It does not even see that rank 0 is gone."""
    others = set(children(os.getpid()))
    ranks = Followers(2, ["--model", "none", "--tensor-parallel-size", "2"])
    place = await ranks.start()
    assert place.listen_fd is not None
    os.close(place.listen_fd)
    (follower,) = set(children(os.getpid())) - others
    os.kill(follower, signal.SIGSTOP)
    await ranks.close()
    assert not is_running(follower)


@asynccontextmanager
async def starting(model: Path, log: Path) -> AsyncIterator[tuple[Process, int]]:
    """A worker that has not loaded anything, and its other rank."""
    process = Process("worker", rank_arguments(model), log)
    try:
        await eventually(lambda: bool(children(process.popen.pid)))
        (follower,) = children(process.popen.pid)
        yield process, follower
    finally:
        await process.close()


async def test_no_rank_outlives_a_start_that_fails(byte_model: Path, tmp_path: Path) -> None:
    """Rank 0 is killed, or the other one is: no process is left, and rank 0 says what happened."""
    async with starting(byte_model, tmp_path / "killed.log") as (process, follower):
        await process.kill()
        await eventually(lambda: not is_running(follower))
    async with starting(byte_model, tmp_path / "alone.log") as (process, follower):
        os.kill(follower, signal.SIGKILL)
        message = (await process.announced("failed"))["message"]
        assert message == "rank 1 was killed by SIGKILL while the model was loading; see the log above"
        assert await process.wait() == 1
