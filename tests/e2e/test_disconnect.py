"""A lost client is an abort, in every phase; nobody else notices (BL-14, F4, F5, F6)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from stepahead.v1 import generation_pb2
from tests.e2e.stack import DELIVERY_FINAL_ONLY, Answer, Stack, eventually, fold, read_events, request, serve
from tests.e2e.tagged_oracle import expected

pytestmark = pytest.mark.e2e

ONE_ROW = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
LONG_PROMPT = list(range(1, 201))
"""25 steps of 8 tokens."""


async def in_phase(stack: Stack, request_id: str, phase: str, *, output_tokens: int = 0) -> None:
    """Waits until a request is queued, in prefill or in decode."""

    def is_there() -> bool:
        live = stack.server.front_end.live.get(("", request_id))
        wanted = generation_pb2.Keepalive.Phase.Value(f"PHASE_{phase.upper()}")
        return live is not None and live.phase == wanted and live.num_output_tokens >= output_tokens

    await eventually(is_there)


@pytest.mark.parametrize("final_only", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_a_client_that_leaves_frees_everything(phase: str, final_only: bool) -> None:
    async with serve("toy:sleep?ms=5", worker=ONE_ROW) as stack:
        fields: dict[str, Any] = {"delivery": DELIVERY_FINAL_ONLY} if final_only else {}
        if phase == "queued":
            other = stack.open(request([1], 200, request_id="other"))
            await read_events(other, "delta", Answer())
        prompt = [1] if phase == "decode" else LONG_PROMPT
        call = stack.open(request(prompt, 50, request_id="leaver", **fields))
        await in_phase(stack, "leaver", phase, output_tokens=3 if phase == "decode" else 0)
        call.cancel()
        if phase == "queued":
            await eventually(lambda: len(stack.server.engine.book.requests) == 1)
            other.cancel()
        await stack.assert_quiescent()
        totals = (await stack.status()).totals
        assert totals.requests_finished == 0
        assert totals.requests_cancelled == totals.requests_accepted
        assert totals.output_tokens < 100


async def test_a_channel_that_closes_frees_everything() -> None:
    async with serve("toy:sleep?ms=2") as stack:
        async with grpc.aio.insecure_channel(stack.server.address) as channel:
            calls = [Stack(stack.server, channel).open(request([index], 250)) for index in range(20)]
            assert len(calls) == 20
            await eventually(lambda: stack.server.engine.core.totals.output_tokens > 20)
        await stack.assert_quiescent()
        assert (await stack.status()).totals.requests_finished == 0


def crowd(rng: random.Random) -> list[Any]:
    """100 requests of all kinds; every fifth will be cancelled and is long enough for that."""
    return [
        request(
            [rng.randrange(257) for _ in range(rng.randint(100, 150) if index % 5 == 0 else rng.randint(1, 60))],
            rng.randint(60, 100) if index % 5 == 0 else rng.randint(1, 40),
            request_id=f"r{index}",
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**64),
        )
        for index in range(100)
    ]


async def until_cancelled(stack: Stack, message: generation_pb2.GenerateRequest, victim: int) -> Answer:
    """Ends a request in a phase that depends on its number: queued, in mid-prefill, in mid-decode."""
    if victim % 3 == 1:  # calls arrive in any order: this one comes when the batch is full for long
        await eventually(lambda: len(stack.server.engine.core.waiting) > 20)
    call = stack.open(message)
    answer = Answer()
    if victim % 3 == 1:
        await in_phase(stack, message.request_id, "queued")
    else:
        await read_events(call, "started" if victim % 3 == 2 else "delta", answer)
    if victim % 2:
        call.cancel()
        return answer
    await stack.generation.Cancel(generation_pb2.CancelRequest(request_ids=[message.request_id]))
    return await fold(call, answer)


async def test_100_streams_of_which_20_are_cancelled() -> None:
    """F1, F5, E6, J3: the others' tokens are those of a run alone, which the oracle knows."""
    messages = crowd(random.Random(11))
    async with serve("toy:tagged", worker={"num_kv_blocks": 160, "step_s": 0.002}) as stack:
        answers = await asyncio.gather(
            *(
                until_cancelled(stack, message, index // 5) if index % 5 == 0 else stack.answer(message)
                for index, message in enumerate(messages)
            )
        )
        await stack.assert_quiescent()
        totals = (await stack.status()).totals
        assert (totals.requests_accepted, totals.requests_cancelled) == (100, 20)
    victims = answers[::5]
    # Every other one leaves without a word; one that was cancelled before admission has a status alone.
    assert {answer.reason for answer in victims[::2]} <= {"CANCELLED", ""}
    assert {answer.code for answer in victims[::2]} == {grpc.StatusCode.CANCELLED}
    assert {answer.reason for answer in victims[1::2]} == {""}
    told = [(answer.started is not None, bool(answer.token_ids)) for answer in victims[::2]]
    assert set(told) == {(False, False), (True, False), (True, True)}, "every phase was hit"
    for index, (message, answer) in enumerate(zip(messages, answers, strict=True)):
        solo = expected(message)
        assert answer.ok == (index % 5 != 0), (index, answer)
        assert answer.token_ids == (solo if answer.ok else solo[: len(answer.token_ids)]), index
