"""Public request ids: duplicates, attaching by the same id, Cancel."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from stepahead.v1 import generation_pb2
from tests.e2e.stack import Answer, Stack, fold, read_events, request, serve

pytestmark = pytest.mark.e2e

CANCELLED = generation_pb2.CANCEL_OUTCOME_CANCELLED
ALREADY_FINISHED = generation_pb2.CANCEL_OUTCOME_ALREADY_FINISHED
NOT_FOUND = generation_pb2.CANCEL_OUTCOME_NOT_FOUND
SLOW = "toy:sleep?ms=5"


async def cancel(stack: Stack, *request_ids: str) -> list[int]:
    response = await stack.generation.Cancel(generation_pb2.CancelRequest(request_ids=request_ids))
    return list(response.outcomes)


async def test_a_live_id_with_another_body_already_exists() -> None:
    """F7."""
    async with serve(SLOW) as stack:
        first = stack.open(request([1, 2], 60, request_id="mine"))
        answer = Answer()
        await read_events(first, "delta", answer)
        refused = await stack.generate([1, 2], 61, request_id="mine")
        assert refused.code is grpc.StatusCode.ALREADY_EXISTS
        assert dict(refused.error_info.metadata) == {"request_id": "mine"}
        await fold(first, answer)
        assert (answer.ok, len(answer.token_ids)) == (True, 60)
        again = await stack.generate([1, 2], 61, request_id="mine")
        assert (again.ok, len(again.token_ids)) == (True, 61), "a public id is free again after its end"


async def test_the_same_body_attaches_from_the_first_token() -> None:
    async with serve(SLOW) as stack:
        message = request([1, 2], 60, request_id="mine", temperature=1.0)
        first = stack.open(message)
        answer = Answer()
        await read_events(first, "delta", answer)
        second = asyncio.create_task(stack.answer(message))
        await fold(first, answer)
        attached = await second
        assert answer.ok
        assert attached.ok
        assert attached.token_ids == answer.token_ids
        assert attached.started == answer.started
        assert attached.finished == answer.finished
        assert (await stack.status()).totals.requests_accepted == 1


async def test_a_request_lives_until_its_last_stream_is_gone() -> None:
    """F6."""
    async with serve(SLOW) as stack:
        message = request([1, 2], 60, request_id="mine")
        first, second = stack.open(message), stack.open(message)
        answer = Answer()
        await read_events(first, "delta", Answer())
        await read_events(second, "delta", answer)
        first.cancel()
        await fold(second, answer)
        assert (answer.ok, len(answer.token_ids)) == (True, 60)
        await stack.assert_quiescent()


async def test_cancel_is_idempotent_and_tells_what_it_found() -> None:
    """F3."""
    async with serve(SLOW) as stack:
        done = await stack.generate([1, 2], 1, request_id="done")
        assert done.ok
        live = stack.open(request([1, 2], 200, request_id="live"))
        answer = Answer()
        await read_events(live, "delta", answer)
        assert await cancel(stack, "live", "never", "done", "live") == [
            CANCELLED,
            NOT_FOUND,
            ALREADY_FINISHED,
            ALREADY_FINISHED,
        ]
        assert await cancel(stack, "live") == [ALREADY_FINISHED]
        await fold(live, answer)
        assert (answer.code, answer.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED")
        assert answer.error_info.reason == "REQUEST_CANCELLED"
        assert answer.choice is not None
        assert answer.choice.output_tokens == len(answer.token_ids) < 200
        await stack.assert_quiescent()
        totals = (await stack.status()).totals
        assert (totals.requests_accepted, totals.requests_finished, totals.requests_cancelled) == (2, 1, 1)


@pytest.mark.parametrize("count", [0, 1025])
async def test_cancel_bounds_its_ids(count: int) -> None:
    """V5."""
    async with serve("toy:score-table") as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cancel(stack, *(str(index) for index in range(count)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_ids" in (caught.value.details() or "")


async def test_made_ids_are_told_and_can_be_cancelled() -> None:
    async with serve(SLOW) as stack:
        call = stack.open(request([1, 2], 200))
        answer = Answer()
        await read_events(call, "started", answer)
        assert answer.started is not None
        assert await cancel(stack, answer.started.request_id) == [CANCELLED]
        await fold(call, answer)
        assert answer.code is grpc.StatusCode.CANCELLED
