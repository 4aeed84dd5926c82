"""Structured output through the whole stack: the text always fits, whatever the model would rather say."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from stepahead.v1 import generation_pb2
from tests.e2e.byte_model import EOS
from tests.e2e.processes import run, worker_arguments
from tests.e2e.stack import Answer, Stack, eventually, read_events, request, serve, serve_scheduler

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = "(red|green) [0-9]{1,3}"
WORKER = {"max_model_len": 512, "num_kv_blocks": 1024}


def constrained(seed: int, **kind: Any) -> generation_pb2.GenerateRequest:
    """A sampled request with a constraint and room for its text."""
    message = request("Say:", 200, temperature=1.0, seed=seed)
    message.constraint.CopyFrom(generation_pb2.Constraint(**kind))
    return message


def fits(message: generation_pb2.GenerateRequest, text: str) -> bool:
    constraint = message.constraint
    if constraint.WhichOneof("kind") == "regex":
        return re.fullmatch(constraint.regex, text) is not None
    if constraint.WhichOneof("kind") == "choices":
        return text in constraint.choices.choices
    value = json.loads(text)
    if constraint.WhichOneof("kind") == "json_schema":
        jsonschema.validate(value, json.loads(constraint.json_schema))
    return isinstance(value, dict)


def mixed(count: int) -> list[generation_pb2.GenerateRequest]:
    """Schemas, expressions and choices in turn."""
    kinds: list[dict[str, Any]] = [
        {"json_schema": json.dumps(SCHEMA)},
        {"regex": REGEX},
        {"choices": {"choices": ["yes", "no", "maybe"]}},
    ]
    return [constrained(index, **kinds[index % 3]) for index in range(count)]


@pytest.mark.parametrize("overlap_depth", [0, 1])
async def test_constrained_and_free_rows_share_a_batch(byte_model: Path, overlap_depth: int) -> None:
    """I1, I2, I4: each constrained text fits; free neighbours say what they say alone; the lane drains clean."""
    messages = mixed(6)
    free = request("Say:", 40, temperature=1.0, seed=99, ignore_eos=True)
    async with serve(str(byte_model), worker=WORKER, overlap_depth=overlap_depth) as stack:
        alone = await stack.answer(free)
        *answers, beside = await stack.answers([*messages, free])
        for message, answer in zip(messages, answers, strict=True):
            assert answer.reason == "STOP", (answer.reason, answer.message, answer.text)
            assert fits(message, answer.text), answer.text
        assert beside.token_ids == alone.token_ids
        await stack.assert_quiescent()


async def test_the_same_text_solo_batched_preempted_and_on_two_lanes(byte_model: Path) -> None:
    """D4, G7, J3: 5 blocks of pool per request force preemption; the grammar goes with the request."""
    messages = mixed(6)
    async with serve(str(byte_model), worker=WORKER) as stack:
        solo = [(await stack.answer(message)).token_ids for message in messages]
        assert [answer.token_ids for answer in await stack.answers(messages)] == solo
    tight = WORKER | {"max_num_seqs": 6, "num_kv_blocks": 32, "max_model_len": 128}
    shorter = [_with_max_tokens(message, 100) for message in messages]
    async with serve(str(byte_model), worker=tight) as stack:
        answers = await stack.answers(shorter)
        assert sum(answer.finished.timings.preemptions for answer in answers if answer.finished) > 0
        assert [answer.token_ids for answer in answers] == [tokens[:100] for tokens in solo]
    async with serve(str(byte_model), worker=WORKER, num_workers=2) as stack:
        assert [answer.token_ids for answer in await stack.answers(messages)] == solo


def _with_max_tokens(message: generation_pb2.GenerateRequest, count: int) -> generation_pb2.GenerateRequest:
    copy = generation_pb2.GenerateRequest()
    copy.CopyFrom(message)
    copy.stopping.max_tokens = count
    return copy


async def test_choices_of_a_constrained_request_fit_each_and_differ(byte_model: Path) -> None:
    """J5: a grammar per choice."""
    message = constrained(3, regex="[a-z]{8}")
    message.num_choices = 4
    async with serve(str(byte_model), worker=WORKER) as stack:
        texts = dict.fromkeys(range(4), "")
        ends = 0
        async for response in stack.generation.Generate(message):
            for event in response.events:
                texts[event.delta.choice_index] += event.delta.text if event.HasField("delta") else ""
                ends += event.HasField("choice_finished")
        assert ends == 4
        assert all(re.fullmatch("[a-z]{8}", text) for text in texts.values()), texts
        assert len(set(texts.values())) > 1


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ({"json_schema": '{"uniqueItems": true}'}, "constraint.json_schema"),
        ({"json_schema": "{"}, "constraint.json_schema"),
        ({"regex": "("}, "constraint.regex"),
        ({"grammar": "start: nothing"}, "constraint.grammar"),
        ({"choices": {"choices": []}}, "constraint.choices.choices"),
        ({"json_object": False}, "constraint.json_object"),
        ({}, "constraint"),
    ],
)
async def test_a_bad_constraint_is_refused_by_name(byte_model: Path, kind: dict[str, Any], field: str) -> None:
    """I6, V4: before admission; the stack goes on."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        message = request("Say:", 8)
        message.constraint.CopyFrom(generation_pb2.Constraint(**kind))
        answer = await stack.answer(message)
        assert (answer.code, answer.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
        assert (await stack.generate("x", 2, ignore_eos=True)).ok


async def test_a_constraint_ends_where_its_text_ends(byte_model: Path) -> None:
    """The end costs no token: nothing can follow, so nothing is waited for. ignore_eos has no say."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        answer = await stack.answer(constrained(1, choices={"choices": ["yes"]}))
        assert (answer.text, answer.reason, len(answer.token_ids)) == ("yes", "STOP", 3)
        message = constrained(1, regex="a")
        message.stopping.ignore_eos = True
        assert (await stack.answer(message)).fields == ["stopping.ignore_eos"]


async def test_a_text_that_may_go_on_ends_with_the_models_end(byte_model: Path) -> None:
    message = constrained(1, regex="[ab]*")
    message.sampling.logit_bias.add(token_id=EOS, bias=100)
    async with serve(str(byte_model), worker=WORKER) as stack:
        answer = await stack.answer(message)
        assert (answer.token_ids, answer.choice.token_id if answer.choice else 0) == ([EOS], EOS)


@pytest.mark.parametrize(
    "fields",
    [{"allowed_token_ids": [ord("x")]}, {"min_tokens": 5}],
    ids=["banned otherwise", "complete before min_tokens"],
)
async def test_a_row_that_may_sample_nothing_ends_with_a_reason(byte_model: Path, fields: dict[str, Any]) -> None:
    """I7: no token is invented; the neighbours go on."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        message = request("Say:", 20, **fields)
        message.constraint.CopyFrom(generation_pb2.Constraint(regex="abc"))
        answer, free = await stack.answers([message, request("x", 30, ignore_eos=True)])
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "min_tokens" in answer.message
        assert answer.error_info.metadata["fault"] == "nothing_allowed"
        assert (free.ok, len(free.token_ids)) == (True, 30)
        await stack.assert_quiescent()


async def test_a_wide_schema_goes_on_behind_its_first_key(byte_model: Path) -> None:
    """A limit of the engine on items per row once ended it there: what compiles must also run."""
    wide = {"type": "object", "properties": {f"k{index}": {"enum": [0]} for index in range(1000)}}
    message = constrained(
        2, json_schema=json.dumps(wide | {"additionalProperties": False, "required": ["k7", "k9"]})
    )
    message.stopping.max_tokens = 400
    # No white space and few keys, so that the answer ends.
    message.sampling.allowed_token_ids.extend({ord(char) for char in '{}":,k790'})
    async with serve(str(byte_model), worker=WORKER) as stack:
        answer = await stack.answer(message)
        assert answer.reason == "STOP", (answer.reason, answer.message)
        assert set(json.loads(answer.text)) >= {"k7", "k9"}


@pytest.mark.parametrize("fields", [{"queue_timeout_ms": 30}, {}], ids=["queue timeout", "cancel"])
async def test_who_was_never_admitted_ends_with_a_status_alone(fields: dict[str, Any]) -> None:
    """D8: nothing comes before Started, an end of a choice neither."""
    async with serve("toy:sleep?ms=5", worker={"max_num_seqs": 1}) as stack:
        first = stack.open(request([1], 100))
        await read_events(first, "delta", Answer())
        waiting = asyncio.create_task(stack.answer(request([2], 4, request_id="late", **fields)))
        if not fields:
            await eventually(lambda: ("", "late") in stack.server.front_end.live)
            await stack.generation.Cancel(generation_pb2.CancelRequest(request_ids=["late"]))
        answer = await waiting
        expected = grpc.StatusCode.DEADLINE_EXCEEDED if fields else grpc.StatusCode.CANCELLED
        assert (answer.code, answer.started, answer.choice) == (expected, None, None)
        first.cancel()


async def test_cancel_reaches_a_request_whose_grammar_is_being_compiled(byte_model: Path) -> None:
    """F1, F3: exactly one terminal, and it is the cancellation."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        message = constrained(1, regex="[a-z]{40}")  # the first constraint also loads the engine
        message.request_id = "early"
        answering = asyncio.create_task(stack.answer(message))
        cancel = generation_pb2.CancelRequest(request_ids=["early"])

        async def is_cancelled() -> bool:
            (outcome,) = (await stack.generation.Cancel(cancel)).outcomes
            return outcome == generation_pb2.CANCEL_OUTCOME_CANCELLED

        await eventually(is_cancelled)
        answer = await answering
        assert (answer.code, answer.token_ids) == (grpc.StatusCode.CANCELLED, [])
        await stack.assert_quiescent()


async def test_a_client_that_leaves_takes_its_gates_along(byte_model: Path) -> None:
    """F2, design rule 4: the row of a gone request is told to skip; nobody waits for its mask."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        for index in range(4):
            leaver = stack.open(constrained(index, regex="[a-z]{150}"))
            await read_events(leaver, "delta", Answer())
            stayer = asyncio.create_task(stack.answer(constrained(9, regex="[a-z]{60}")))
            await asyncio.sleep(0.01 * index)
            leaver.cancel()
            answer = await asyncio.wait_for(stayer, 10)
            assert re.fullmatch("[a-z]{60}", answer.text)
        await stack.assert_quiescent()


async def test_a_killed_worker_takes_no_grammar_along(byte_model: Path, tmp_path: Path) -> None:
    """O1, G3: kill -9 in mid-answer; the text goes on, and fits, on the other lane."""
    messages = [constrained(index, regex="[a-z ]{150}") for index in range(4)]
    arguments = worker_arguments(str(byte_model))
    async with (
        run("worker", *arguments, log=tmp_path / "first.log") as first,
        run("worker", *arguments, log=tmp_path / "second.log") as second,
        serve_scheduler(first.address, second.address) as stack,
    ):
        await eventually(lambda: len(stack.server.engine.links) == 2)
        expected = [(await stack.answer(message)).token_ids for message in messages]
        running = asyncio.create_task(stack.answers(messages))
        await eventually(lambda: _num_tokens(stack) > 20)
        await first.kill()
        answers = await running
        assert [(answer.code.name, answer.message) for answer in answers] == [("OK", "")] * len(messages)
        assert [answer.token_ids for answer in answers] == expected
        assert sum(answer.finished.timings.preemptions for answer in answers if answer.finished) > 0
        assert all(re.fullmatch("[a-z ]{150}", answer.text) for answer in answers)


def _num_tokens(stack: Stack) -> int:
    return sum(live.num_output_tokens for live in stack.server.engine.book.requests.values())
