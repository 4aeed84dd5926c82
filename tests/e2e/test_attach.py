"""Attach: a stream that broke is continued at any index, without a gap or a repeat, also after the end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from stepahead.v1 import generation_pb2
from tests.e2e.stack import Answer, Stack, eventually, fold, read_events, request, serve
from tests.e2e.test_choices import Choices

pytestmark = pytest.mark.e2e

WORKER = {"max_model_len": 512, "num_kv_blocks": 1024}
WINDOW_MS = 60_000


def kept(request_id: str, max_tokens: int = 40, **fields: Any) -> generation_pb2.GenerateRequest:
    fields = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "reattach_window_ms": WINDOW_MS} | fields
    return request("Say:", max_tokens, request_id=request_id, **fields)


def attach(stack: Stack, request_id: str, *indexes: int) -> Any:
    message = generation_pb2.AttachRequest(request_id=request_id, next_token_indexes=indexes)
    return stack.generation.Attach(message)


async def test_every_index_of_an_ended_request(byte_model: Path) -> None:
    """B11, K1: what was read and what is attached make the whole, tokens and text alike, at each index."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        whole = await stack.answer(kept("a", stop_strings=["zzzz"]))
        assert whole.ok
        for index in range(len(whole.token_ids) + 1):
            seen, rest = Answer(), Answer()
            # The text a reader has at an index is what a stream had delivered by then.
            seen.text = await _text_at(stack, whole.token_ids[:index])
            rest.token_ids = whole.token_ids[:index]
            rest.started = None
            answer = await _continued(stack, "a", index, whole.token_ids[:index])
            assert answer.token_ids == whole.token_ids
            assert seen.text + answer.text == whole.text, index
            assert answer.finished == whole.finished


async def _continued(stack: Stack, request_id: str, index: int, have: list[int]) -> Answer:
    answer = Answer()
    async for response in attach(stack, request_id, index):
        for event in response.events:
            kind = event.WhichOneof("kind")
            answer.add(event)
            if kind == "started":
                answer.token_ids = list(have)
    return answer


async def _text_at(stack: Stack, token_ids: list[int]) -> str:
    """Text that is final after these tokens: with the stop string of the test, and a byte-level decoder."""
    from stepahead.scheduler.text.choice_text import ChoiceText

    codec = stack.server.cluster.require_model().codec
    assert codec is not None
    return ChoiceText(codec, stop_strings=["zzzz"]).push(token_ids).text


async def test_a_broken_stream_goes_on_where_it_was(byte_model: Path) -> None:
    """O1, design 5: the request outlives its stream; nothing is computed twice."""
    worker = WORKER | {"step_s": 0.003}
    async with serve(str(byte_model), worker=worker) as stack:
        expected = await stack.answer(kept("first"))
        call = stack.open(kept("second"))
        answer = Answer()
        await read_events(call, "delta", answer, count=3)
        call.cancel()
        have = len(answer.token_ids)
        await eventually(lambda: not stack.server.front_end.live["", "second"].subscriptions)
        rest = await _continued(stack, "second", have, answer.token_ids)
        assert rest.token_ids == expected.token_ids
        assert answer.text + rest.text == expected.text
        assert (await stack.status()).totals.requests_accepted == 2


async def test_two_streams_of_one_request_hear_the_same() -> None:
    async with serve("toy:sleep?ms=3") as stack:
        call = stack.open(request([1], 60, request_id="both"))
        first, second = await asyncio.gather(fold(call), _attached_soon(stack, "both"))
        assert first.token_ids == second.token_ids
        await stack.assert_quiescent()


async def _attached_soon(stack: Stack, request_id: str) -> Answer:
    await eventually(lambda: ("", request_id) in stack.server.front_end.live)
    return await fold(attach(stack, request_id))


async def test_nobody_comes_back() -> None:
    """F6: the window ends the request, and what was kept."""
    async with serve("toy:sleep?ms=5") as stack:
        call = stack.open(request([1], 250, request_id="gone", reattach_window_ms=30))
        await call.read()
        call.cancel()
        await stack.assert_quiescent()
        totals = (await stack.status()).totals
        assert (totals.requests_cancelled, totals.requests_finished) == (1, 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fold_raising(attach(stack, "gone"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def fold_raising(call: Any) -> None:
    async for _ in call:
        pass


async def test_cancel_forgets_what_was_kept(byte_model: Path) -> None:
    """F3: also of a request that has ended; the second time it is a request that was."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        assert (await stack.answer(kept("kept", 5))).ok
        cancel = generation_pb2.CancelRequest(request_ids=["kept", "never"])
        for _ in range(2):
            outcomes = (await stack.generation.Cancel(cancel)).outcomes
            assert list(outcomes) == [
                generation_pb2.CANCEL_OUTCOME_ALREADY_FINISHED,
                generation_pb2.CANCEL_OUTCOME_NOT_FOUND,
            ]
        assert not stack.server.front_end.live


async def test_the_same_request_again_is_the_same_answer(byte_model: Path) -> None:
    """Design 5: a retry with the same id and body attaches to the kept answer; another body is another request."""
    async with serve(str(byte_model), worker=WORKER) as stack:
        first, again = await stack.answer(kept("same", 8)), await stack.answer(kept("same", 8))
        assert first.token_ids == again.token_ids
        assert (await stack.status()).totals.requests_accepted == 1
        other = await stack.answer(kept("same", 9))
        assert (other.ok, len(other.token_ids)) == (True, 9)
        assert (await stack.status()).totals.requests_accepted == 2


@pytest.mark.parametrize(("indexes", "field"), [((0, 0), "next_token_indexes"), ((9,), "next_token_indexes[0]")])
async def test_what_was_never_said_cannot_be_continued(indexes: tuple[int, ...], field: str) -> None:
    """V5."""
    async with serve("toy:sleep?ms=1") as stack:
        assert (await stack.answer(request([1], 5, request_id="short", reattach_window_ms=WINDOW_MS))).ok
        answer = await fold(attach(stack, "short", *indexes))
        assert (answer.code, answer.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


async def test_choices_are_continued_each_at_its_own_index(byte_model: Path) -> None:
    async with serve(str(byte_model), worker=WORKER) as stack:
        whole = Choices()
        async for response in stack.open(kept("many", 10, num_choices=3)):
            for event in response.events:
                whole.add(event)
        rest = Choices()
        for index, have in ((0, 4), (1, 10)):
            rest.tokens[index] = whole.tokens[index][:have]
        async for response in attach(stack, "many", 4, 10):
            for event in response.events:
                rest.add(event)
        assert rest.tokens == whole.tokens
        assert rest.finished == whole.finished
