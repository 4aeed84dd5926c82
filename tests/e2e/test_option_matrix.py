"""Every option means the same alone, batched, preempted, overlapped and on another lane (D4, G7, J3)."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stepahead.scheduler.core import LaneId, PlanOutcome, RequestKey
from stepahead.v1 import generation_pb2
from tests.e2e.stack import Stack, request, serve

pytestmark = pytest.mark.e2e

MAX_TOKENS = 16
WORKER = {"max_model_len": 256, "num_kv_blocks": 1024, "dtype": "float32", "max_num_seqs": 16}

MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9, "logprobs": {"output_top_k": 3}},
    {"temperature": 1.0, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.3},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logprobs": {"output_top_k": 0, "prompt_top_k": 2}},
    {"temperature": 0.7, "seed": 4, "logit_bias": [{"token_id": 65, "bias": 3.0}], "frequency_penalty": -0.5},
    {"bad_words": [{"ids": [65]}, {"ids": [66, 67]}], "temperature": 2.0, "seed": 5},
    {"allowed_token_ids": list(range(40, 90)), "temperature": 1.0, "seed": 6, "min_tokens": 8},
    {"constraint": {"regex": "[a-f]{4}-[0-9]{9}"}, "temperature": 1.0, "seed": 7},
    {"constraint": {"json_object": True}, "temperature": 1.0, "seed": 8, "repetition_penalty": 1.1},
    {"num_choices": 3, "temperature": 1.0, "seed": 9, "presence_penalty": 1.0},
    {
        "num_choices": 2,
        "temperature": 1.0,
        "seed": 10,
        "constraint": {"json_schema": json.dumps({"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 4})},
        "logprobs": {"output_top_k": 2, "kind": generation_pb2.LogprobParams.KIND_PROCESSED},
    },
]

Answer = dict[int, tuple[list[int], list[float], list[int]]]
"""By choice: tokens, their log probabilities, the best ids."""


def requests() -> list[generation_pb2.GenerateRequest]:
    return [request(f"Once upon a time {index}", MAX_TOKENS, **mix) for index, mix in enumerate(MIXES)]


async def answer_of(stack: Stack, message: generation_pb2.GenerateRequest) -> Answer:
    answer: defaultdict[int, tuple[list[int], list[float], list[int]]] = defaultdict(lambda: ([], [], []))
    async for response in stack.generation.Generate(message):
        for event in response.events:
            if event.HasField("delta"):
                tokens, logprobs, best = answer[event.delta.choice_index]
                tokens += event.delta.token_ids
                logprobs += event.delta.logprobs.token_logprobs
                best += event.delta.logprobs.top_token_ids
            if event.HasField("prompt_logprobs"):
                answer[-1][1].extend(event.prompt_logprobs.logprobs.token_logprobs)
                answer[-1][2].extend(event.prompt_logprobs.logprobs.top_token_ids)
    return dict(answer)


async def together(stack: Stack) -> list[Answer]:
    return list(await asyncio.gather(*(answer_of(stack, message) for message in requests())))


def preempt_after_every_token(stack: Stack) -> list[int]:
    """Every running sequence loses its place after each of its outputs. Returns a list that grows by one each."""
    core, book = stack.server.engine.core, stack.server.engine.book
    plan = core.plan
    seen: defaultdict[RequestKey, int] = defaultdict(int)
    preempted: list[int] = []

    def preempting(lane_id: LaneId) -> PlanOutcome:
        lane = core.lanes[lane_id]
        for stay in list(lane.decoding):
            sequence = stay.sequence
            if sequence.num_output_tokens > seen[sequence.request.key]:
                seen[sequence.request.key] = sequence.num_output_tokens
                lane.retire(stay)
                book.note_preempted((core._preempt(sequence),))  # pyright: ignore[reportPrivateUsage]
                preempted.append(sequence.num_output_tokens)
        return plan(lane_id)

    core.plan = preempting  # type: ignore[method-assign]
    return preempted


@asynccontextmanager
async def stack_of(model: str, **fields: Any) -> AsyncIterator[Stack]:
    async with serve(model, worker=WORKER, **fields) as stack:
        yield stack


async def check(model: str) -> None:
    """The matrix: solo, batched, overlap off, preempted at every output index, two lanes."""
    async with stack_of(model) as stack:
        solo = [await answer_of(stack, message) for message in requests()]
        assert all(any(tokens for tokens, _, _ in answer.values()) for answer in solo)
        assert len(solo[4][-1][1]) == len(solo[4][-1][2]) // 2 > 0, "prompt log probabilities"
        assert await together(stack) == solo, "batched"
        await stack.assert_quiescent()
    async with stack_of(model, overlap_depth=0) as stack:
        assert await together(stack) == solo, "overlap off"
    async with stack_of(model) as stack:
        preempted = preempt_after_every_token(stack)
        assert await together(stack) == solo, "preempted"
        assert set(preempted) >= set(range(1, MAX_TOKENS - 1))
        await stack.assert_quiescent()
    async with stack_of(model, num_workers=2) as stack:
        assert await together(stack) == solo, "two lanes"
        for link in stack.server.engine.links.values():
            assert link.stats.num_boundaries > 0


async def test_a_tiny_model(byte_model: Path) -> None:
    await check(str(byte_model))


@pytest.mark.smollm2
@pytest.mark.slow
async def test_smollm2() -> None:
    """The real model, float32, native or torch kernels, whichever the machine has."""
    model = os.environ.get("STEPAHEAD_TEST_SMOLLM2")
    if not model:
        pytest.skip("STEPAHEAD_TEST_SMOLLM2 names no GGUF file")
    await check(model)
