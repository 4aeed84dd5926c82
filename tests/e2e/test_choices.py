"""Several choices of one request: one prompt, streams of their own, ends of their own, one end of the request."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import pytest

from stepahead.v1 import generation_pb2
from tests.e2e.stack import DELIVERY_FINAL_ONLY, Stack, eventually, request, serve

pytestmark = pytest.mark.e2e

WORKER = {"max_model_len": 512, "num_kv_blocks": 1024}


class Choices:
    """Folds a stream of several choices, checking order and indices (rules B11, D8)."""

    def __init__(self) -> None:
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.text: defaultdict[int, str] = defaultdict(str)
        self.ends: dict[int, generation_pb2.ChoiceFinished] = {}
        self.num_started = 0
        self.finished: generation_pb2.GenerationFinished | None = None

    def add(self, event: generation_pb2.GenerationEvent) -> None:
        kind = event.WhichOneof("kind")
        assert self.finished is None, f"{kind} after the end"
        if kind == "started":
            self.num_started += 1
        elif kind == "delta":
            index = event.delta.choice_index
            assert index not in self.ends
            assert event.delta.first_token_index == len(self.tokens[index])
            self.tokens[index] += event.delta.token_ids
            self.text[index] += event.delta.text
        elif kind == "choice_finished":
            assert event.choice_finished.choice_index not in self.ends
            self.ends[event.choice_finished.choice_index] = event.choice_finished
        elif kind == "finished":
            self.finished = event.finished


async def fold(call: Any) -> Choices:
    choices = Choices()
    async for response in call:
        for event in response.events:
            choices.add(event)
    return choices


def several(count: int, **fields: Any) -> generation_pb2.GenerateRequest:
    fields = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 20} | fields
    return request(list(range(30)), None, num_choices=count, **fields)


@pytest.mark.parametrize("overlap_depth", [0, 1])
async def test_each_choice_is_what_a_fork_would_say_alone(byte_model: Path, overlap_depth: int) -> None:
    """J4, J5: draws depend on (seed, choice, index); choice 0 is the request without choices."""
    async with serve(str(byte_model), worker=WORKER, overlap_depth=overlap_depth) as stack:
        single = await stack.answer(several(1))
        choices = await fold(stack.open(several(4)))
        assert choices.tokens[0] == single.token_ids
        assert len({tuple(tokens) for tokens in choices.tokens.values()}) == 4
        assert await _tokens(stack, several(4)) == dict(choices.tokens), "seeded choices repeat"
        assert choices.finished is not None
        usage = choices.finished.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (30, 80)
        assert {end.output_tokens for end in choices.ends.values()} == {20}
        await stack.assert_quiescent()


async def _tokens(stack: Stack, message: generation_pb2.GenerateRequest) -> dict[int, list[int]]:
    return dict((await fold(stack.open(message))).tokens)


async def test_choices_end_on_their_own(byte_model: Path) -> None:
    """D8: one end per choice, when it comes; the request ends with the last."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        stops = [token for token in range(256) if token % 7 == 0]
        message = several(8, stop_token_ids=stops[:64], max_tokens=60)
        choices = await fold(stack.open(message))
        lengths = [choices.ends[index].output_tokens for index in range(8)]
        assert [len(choices.tokens[index]) for index in range(8)] == lengths
        assert len(set(lengths)) > 1
        assert choices.finished is not None
        assert choices.finished.usage.output_tokens == sum(lengths)


async def test_more_choices_than_rows_wait_for_a_place(byte_model: Path) -> None:
    """A choice is a sequence like any other: it queues, and its tokens do not depend on when it ran."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        expected = await _tokens(stack, several(6))
    narrow = WORKER | {"max_num_seqs": 2}
    async with serve(str(byte_model), worker=narrow) as stack:
        assert await _tokens(stack, several(6)) == expected


async def test_a_group_that_does_not_fit_the_queue_is_refused_whole() -> None:
    """AD: nothing of it stays behind."""
    async with serve("toy:sleep?ms=5", max_waiting_requests=3) as stack:
        answer = await stack.answer(request([1], 4, num_choices=4))
        assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stack.assert_quiescent()


async def test_cancel_ends_every_choice() -> None:
    async with serve("toy:sleep?ms=5") as stack:
        call = stack.open(request([1], 200, num_choices=4, request_id="all"))
        await call.initial_metadata()
        outcome = await stack.generation.Cancel(generation_pb2.CancelRequest(request_ids=["all"]))
        assert list(outcome.outcomes) == [generation_pb2.CANCEL_OUTCOME_CANCELLED]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fold(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        totals = (await stack.status()).totals
        assert (totals.requests_accepted, totals.requests_cancelled) == (1, 1)
        await stack.assert_quiescent()


async def test_a_deadline_ends_every_choice_once() -> None:
    """D8: the core ends each sequence at the same moment; the client hears of one request."""
    async with serve("toy:sleep?ms=5") as stack:
        answer = stack.open(request([1], 200, num_choices=3, timeout_ms=60))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fold(answer)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await stack.status()).totals.requests_failed == 1
        await stack.assert_quiescent()


async def test_one_delta_per_choice_at_the_end(byte_model: Path) -> None:
    """K1."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        expected = await fold(stack.open(several(3)))
        call = stack.open(several(3, delivery=DELIVERY_FINAL_ONLY))
        deltas = 0
        choices = Choices()
        async for response in call:
            for event in response.events:
                deltas += event.HasField("delta")
                choices.add(event)
        assert deltas == 3
        assert (choices.tokens, choices.text) == (expected.tokens, expected.text)


async def test_choices_travel_over_multiplex(byte_model: Path) -> None:
    """Columns carry choice 0 of plain requests only: several choices come as events."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        expected = await _tokens(stack, several(3))
        call = stack.generation.Multiplex()
        submit = generation_pb2.MultiplexSubmit(handle=1, request=several(3, want_text=False))
        await call.write(generation_pb2.MultiplexRequest(submit=submit))
        await call.done_writing()
        choices = Choices()
        async for response in call:
            assert not response.tokens.handles
            for entry in response.events:
                for event in entry.events:
                    choices.add(event)
        assert dict(choices.tokens) == expected
