"""Faults of other servers around sampling, each provoked on the whole stack; ids are those of the scenarios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.byte_model import VOCAB_SIZE
from tests.e2e.stack import Answer, fold, read_events, request, serve
from tests.e2e.test_choices import Choices
from tests.e2e.test_option_matrix import Answer as Parts
from tests.e2e.test_option_matrix import answer_of, preempt_after_every_token

pytestmark = pytest.mark.e2e

WORKER = {"max_model_len": 256, "num_kv_blocks": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 16}
"""A prompt of 40 tokens takes three chunks."""


async def test_bl05_many_prefills_before_any_decode(byte_model: Path) -> None:
    """C1, C2: cells belong to slots; prefill-only steps and padding never use one up."""
    messages = [request([index, 3, index], 4, ignore_eos=True) for index in range(64)]
    async with serve(str(byte_model), worker=WORKER) as stack:
        solo = [(await stack.answer(message)).token_ids for message in messages]
        assert [answer.token_ids for answer in await stack.answers(messages)] == solo


async def test_bl24_seeded_choices_differ_repeat_and_outlive_each_other(byte_model: Path) -> None:
    """J5, D8: choice 0 ends at its second token; the others go on."""
    message = request([1, 2, 3], 12, num_choices=4, temperature=1.0, seed=7, ignore_eos=True)
    async with serve(str(byte_model), worker=WORKER) as stack:

        async def choices() -> Choices:
            folded = Choices()
            async for response in stack.open(message):
                for event in response.events:
                    folded.add(event)
            return folded

        whole = await choices()
        message.stopping.stop_token_ids.append(whole.tokens[0][1])
        first, again = await choices(), await choices()
        assert first.tokens == again.tokens
        assert first.ends[0].output_tokens <= 2
        assert len({tuple(tokens) for tokens in first.tokens.values()}) == 4
        assert max(len(tokens) for tokens in first.tokens.values()) > 2
        assert first.finished is not None


async def test_bl27_log_probabilities_are_whole(byte_model: Path) -> None:
    """J7, J8, H8: chunks, cached prompts, a crowd, preemption after every token: lengths and values as alone."""
    prompt = [index % 200 for index in range(40)]
    message = request(
        prompt,
        10,
        temperature=1.0,
        seed=1,
        top_p=0.5,
        ignore_eos=True,
        logprobs={"output_top_k": 5, "prompt_top_k": 3},
    )

    def check(parts: Parts) -> None:
        tokens, logprobs, best = parts[0]
        assert len(tokens) == len(logprobs) == len(best) // 5 == 10
        assert len(parts[-1][1]) == len(parts[-1][2]) // 3 == len(prompt) - 1
        assert all(-1e4 <= value <= 0 for value in (*logprobs, *parts[-1][1]))

    async with serve(str(byte_model), worker=WORKER) as stack:
        solo = await answer_of(stack, message)
        check(solo)
        assert await answer_of(stack, message) == solo, "the prompt is cached now"
    async with serve(str(byte_model), worker=WORKER) as stack:
        assert preempt_after_every_token(stack) == []
        neighbours = [stack.open(request([index], 30, ignore_eos=True)) for index in range(6)]
        assert await answer_of(stack, message) == solo, "preempted in a crowd"
        for neighbour in neighbours:
            assert (await fold(neighbour)).ok


@pytest.mark.parametrize(
    "schema",
    [
        '"a string"',
        '{"pattern": "("}',
        '{"pattern": "(?=a)b"}',
        '{"maximum": 1e400}',
        '{"minLength": -1}',
        '{"items": ' * 200 + "{}" + "}" * 200,
        '{"$ref": "http://example.com/schema"}',
    ],
)
async def test_bl28_a_bad_schema_costs_nobody_else_anything(byte_model: Path, schema: str) -> None:
    """I2, I6: refused by name while another client streams; never answered unconstrained."""
    bad = request("x", 8)
    bad.constraint.json_schema = schema
    async with serve(str(byte_model), worker=WORKER) as stack:
        stream, neighbour = stack.open(request("y", 60, ignore_eos=True)), Answer()
        await read_events(stream, "delta", neighbour)
        answer = await stack.answer(bad)
        assert (answer.code, answer.token_ids) == (grpc.StatusCode.INVALID_ARGUMENT, [])
        assert answer.fields[0].startswith("constraint.json_schema")
        await fold(stream, neighbour)
        assert (neighbour.ok, len(neighbour.token_ids)) == (True, 60)


async def test_bl29_late_masks_change_no_answer(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I1 - I4: masks that take longer than the forward; rows that missed one are fed again; every text fits."""
    from stepahead.scheduler import convert

    messages = [request(f"{index}", 40, temperature=1.0, seed=index) for index in range(8)]
    for message in messages:
        message.constraint.json_schema = json.dumps({"type": "array", "items": {"enum": [1, 23]}, "maxItems": 3})
    free = [request([index, 5], 12, temperature=1.0, seed=index, ignore_eos=True) for index in range(8)]
    async with serve(str(byte_model), worker=WORKER) as stack:
        solo = [(await stack.answer(message)).token_ids for message in (*messages, *free)]
        answers = await stack.answers([*messages, *free])
        assert [answer.token_ids for answer in answers] == solo
    # A worker that waits for no mask at all: whatever is not there in time is skipped.
    monkeypatch.setattr(convert, "GATE_WAIT_NS", 1)
    async with serve(str(byte_model), worker=WORKER) as stack:
        answers = await stack.answers([*messages, *free])
        assert [answer.token_ids for answer in answers] == solo
        for answer in answers[:8]:
            assert isinstance(json.loads(answer.text), list)
        await stack.assert_quiescent()


@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        *(({"top_k": value}, True) for value in (-1, 0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**9)),
        *(({"top_p": value}, good) for value, good in ((0.0, False), (1e-9, True), (1.0, True), (1.1, False))),
        *(({"logprobs": {"output_top_k": value}}, good) for value, good in ((0, True), (20, True), (21, False))),
    ],
)
async def test_bl30_sizes_at_the_edges(byte_model: Path, fields: dict[str, Any], is_good: bool) -> None:
    """J9, J3, V5: off, greedy or refused; the greedy neighbour says what it says alone."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        greedy = request([9], 12, ignore_eos=True)
        solo = (await stack.answer(greedy)).token_ids
        edge = request([9], 12, temperature=1.0, seed=3, ignore_eos=True, **fields)
        answer, neighbour = await stack.answers([edge, greedy])
        assert neighbour.token_ids == solo
        assert answer.code is (grpc.StatusCode.OK if is_good else grpc.StatusCode.INVALID_ARGUMENT)
        if fields in ({"top_k": 1}, {"top_p": 1e-9}):
            assert answer.token_ids == solo


async def test_bl31_tiny_temperatures_are_greedy(byte_model: Path) -> None:
    """J9: nothing overflows."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        greedy = (await stack.answer(request([9], 16, ignore_eos=True))).token_ids
        for temperature in (1e-12, 1e-6, 1e-5, 1e-4):
            answer = await stack.answer(request([9], 16, temperature=temperature, seed=5, ignore_eos=True))
            assert answer.token_ids == greedy, temperature
        assert (
            len((await stack.answer(request([9], 16, temperature=0.01, seed=5, ignore_eos=True))).token_ids) == 16
        )
