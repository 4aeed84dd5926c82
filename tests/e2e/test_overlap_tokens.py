"""Overlap changes when things happen, never which tokens come out (D4, G7, J3)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from stepahead.v1 import generation_pb2
from tests.e2e.stack import Answer, Stack, fold, read_events, request, serve
from tests.e2e.tagged_oracle import VOCAB_SIZE, expected

pytestmark = pytest.mark.e2e


async def test_the_oracle_is_what_the_toy_says_alone() -> None:
    rng = random.Random(3)
    async with serve(overlap_depth=0, worker={"max_num_seqs": 1}) as stack:
        for temperature in (0.0, 0.7, 1.0):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(50)]
            message = request(prompt, 40, temperature=temperature, seed=rng.randrange(2**64))
            assert (await stack.answer(message)).token_ids == expected(message)


def mixed_requests(rng: random.Random) -> list[Any]:
    """200 requests of all lengths, greedy and seeded."""
    return [
        request(
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 3, 4, 5, 20, 33, rng.randint(1, 70)]))],
            rng.choice([1, 2, 7, 16, 25, rng.randint(1, 50)]),
            request_id=f"mixed-{index}",
            temperature=rng.choice([0.0, 0.3, 1.0]),
            seed=rng.randrange(2**64),
        )
        for index in range(200)
    ]


async def run(stack: Stack, message: generation_pb2.GenerateRequest, abort_after: int | None) -> Answer:
    """One request; aborted after so many tokens, if it lives that long."""
    call = stack.open(message)
    answer = Answer()
    if abort_after is not None:
        while answer.choice is None and len(answer.token_ids) < abort_after:
            await read_events(call, "delta", answer)
        await stack.generation.Cancel(generation_pb2.CancelRequest(request_ids=[message.request_id]))
    return await fold(call, answer)


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_200_mixed_requests_with_preemptions(depth: int) -> None:
    """D4, G7, J3, E6; aborted ones are prefixes (F5)."""
    rng = random.Random(20)
    messages = mixed_requests(rng)
    aborts = [rng.randint(1, 20) if rng.random() < 0.15 else None for _ in messages]
    pool = {"num_kv_blocks": 56, "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 128}
    async with serve(overlap_depth=depth, worker=pool) as stack:
        gate = asyncio.Semaphore(40)

        async def arrive(message: generation_pb2.GenerateRequest, abort_after: int | None) -> Answer:
            async with gate:
                return await run(stack, message, abort_after)

        answers = await asyncio.gather(*map(arrive, messages, aborts))
        await stack.assert_quiescent()
        status = await stack.status()
    num_aborted = 0
    for message, answer, abort_after in zip(messages, answers, aborts, strict=True):
        tokens = expected(message)
        if answer.ok:
            assert answer.token_ids == tokens
            assert answer.reason == "LENGTH"
            assert answer.finished is not None
            assert answer.finished.usage.output_tokens == len(tokens)
        else:
            assert (answer.code, abort_after is not None) == (grpc.StatusCode.CANCELLED, True)
            assert answer.token_ids == tokens[: len(answer.token_ids)]
            num_aborted += 1
    assert num_aborted > 3
    assert status.totals.preemptions > 0
    assert sum(answer.finished.timings.preemptions for answer in answers if answer.finished) > 0
    (worker,) = status.workers
    assert (worker.steps.boundaries_with_running_step > 0) == (depth > 0), "overlap shows in the boundaries"
