"""A worker of two processes behind a scheduler: the same tokens as one; and whichever dies, both end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Process, run
from tests.e2e.stack import Answer, eventually, fold, read_events, request, serve_scheduler, serve_worker

pytestmark = pytest.mark.e2e


def rank_arguments(model: Path, *more: str) -> list[str]:
    """Flags of a small worker of two ranks."""
    return [
        *("--model", str(model), "--listen", "127.0.0.1:0", "--dtype", "float32", "--tensor-parallel-size", "2"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--block-size", "4"),
        *("--num-kv-blocks", "512", "--max-model-len", "256", *more),
    ]


def children_of(process: Process) -> list[int]:
    """Process ids of a worker's other ranks."""
    pid = process.popen.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
            (follower,) = children_of(ranks)
            os.kill(follower, signal.SIGKILL)
            assert await ranks.wait() == 70
            await asyncio.gather(*(fold(call, answer) for call, answer in calls))
            assert [answer.token_ids for _, answer in calls] == [each.token_ids for each in expected_long]
            assert [worker.connected for worker in (await stack.status()).workers] == [False, True]
        assert "RankLost" in ranks.log
        assert "worker_failed" in ranks.log


async def test_a_rank_that_hangs_is_found_by_the_step_watchdog(byte_model: Path, tmp_path: Path) -> None:
    """O4, O5: a stopped follower makes a step too long; the worker ends, and nothing is left of it."""
    async with (
        run("worker", *rank_arguments(byte_model, "--max-step", "1"), log=tmp_path / "log") as ranks,
        serve_scheduler(ranks.address, lane_wait_s=0.2) as stack,
    ):
        await eventually(lambda: bool(stack.server.engine.links))
        (follower,) = children_of(ranks)
        os.kill(follower, signal.SIGSTOP)
        answer = await stack.generate([1, 2], 3)
        assert answer.error_info.reason == "WORKER_LOST"
        assert await ranks.wait() == 70
        assert "StepTimeout" in ranks.log
        assert not is_running(follower)
