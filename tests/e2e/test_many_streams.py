"""Hundreds of streams, some slow, some gone: nobody else notices, and everything comes back (F6, E6)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.e2e.stack import Answer, Stack, eventually, fold, request, serve

pytestmark = pytest.mark.e2e

NUM_STREAMS, NUM_SLOW, NUM_LEAVING = 500, 50, 50
NUM_TOKENS = 12


async def read_slowly(call: Any) -> Answer:
    """Takes one message, sleeps until everybody else is done, takes the rest."""
    answer = Answer()
    first = await call.read()
    for event in first.events:
        answer.add(event)
    await asyncio.sleep(1.0)
    while (message := await call.read()) is not grpc.aio.EOF:
        for event in message.events:
            answer.add(event)
    return answer


async def leave(call: Any) -> None:
    await call.read()
    call.cancel()


def open_streams(stack: Stack) -> list[Any]:
    # Handles of one channel share a connection: flow control of a slow one must not hold the others.
    return [stack.open(request([index % 250, 1], NUM_TOKENS, ignore_eos=True)) for index in range(NUM_STREAMS)]


async def test_500_streams_of_which_50_are_slow_and_50_leave() -> None:
    worker = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "num_kv_blocks": 1024}
    async with serve("toy:sleep?ms=1", worker=worker) as stack:
        calls = open_streams(stack)
        slow, leaving, normal = (
            calls[:NUM_SLOW],
            calls[NUM_SLOW : NUM_SLOW + NUM_LEAVING],
            calls[NUM_SLOW + NUM_LEAVING :],
        )
        slow_answers = asyncio.gather(*map(read_slowly, slow))
        left = asyncio.gather(*map(leave, leaving))
        answers = await asyncio.gather(*map(fold, normal))
        await left
        for answer in answers:
            assert (answer.code, len(answer.token_ids)) == (grpc.StatusCode.OK, NUM_TOKENS)
        # What a slow reader has not taken is one coalesced rest, not a queue of messages.
        for answer in await slow_answers:
            assert len(answer.token_ids) == NUM_TOKENS
            assert answer.finished is not None
        await stack.assert_quiescent()
        totals = (await stack.status()).totals
        assert totals.requests_accepted == NUM_STREAMS
        assert totals.requests_finished + totals.requests_cancelled == NUM_STREAMS
        await eventually(stack.server.front_end.empty.is_set)
