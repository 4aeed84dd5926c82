"""Tenants and priorities over the wire: ids, cached prefixes and shares are a tenant's own."""

from __future__ import annotations

import grpc
import pytest

from stepahead.scheduler.caller import TENANT_KEY
from stepahead.scheduler.core import Ordering
from stepahead.v1 import generation_pb2
from tests.e2e import stack as e2e

pytestmark = [pytest.mark.e2e]
PROMPT = list(range(1, 30))


async def answer(stack: e2e.Stack, message: generation_pb2.GenerateRequest, tenant: str) -> e2e.Answer:
    call = stack.generation.Generate(message, timeout=e2e.BOUND_S, metadata=((TENANT_KEY, tenant),))
    return await e2e.fold(call)


async def test_h4_a_prefix_is_shared_within_a_tenant_only():
    async with e2e.serve(ordering=Ordering.FAIR) as stack:
        message = e2e.request(PROMPT, 4)
        cached = []
        for tenant in ("a", "a", "b", "b"):
            reply = await answer(stack, message, tenant)
            assert reply.finished is not None
            assert reply.started is not None
            assert reply.started.cached_prompt_tokens == reply.finished.usage.cached_prompt_tokens
            cached.append(reply.finished.usage.cached_prompt_tokens)
        assert cached == [0, 28, 0, 28]
        await stack.assert_quiescent()


async def test_cached_and_computed_prefixes_give_the_same_tokens():
    """H7: cold, hit, and under another salt."""
    async with e2e.serve() as stack:
        answers = [await stack.generate(PROMPT, 12) for _ in range(2)]
        salted = e2e.request(PROMPT, 12)
        salted.scheduling.cache_salt = "s"
        answers.append(await stack.answer(salted))
        assert len({tuple(each.token_ids) for each in answers}) == 1


async def test_the_same_id_is_another_request_for_another_tenant():
    async with e2e.serve("toy:sleep?ms=2") as stack:
        long = e2e.request([1, 2], 200)
        long.request_id = "mine"
        call = stack.generation.Generate(long, metadata=((TENANT_KEY, "a"),))
        await call.read()
        other = e2e.request([3, 4], 2)
        other.request_id = "mine"
        assert (await answer(stack, other, "b")).code is grpc.StatusCode.OK
        cancel = generation_pb2.CancelRequest(request_ids=["mine"])
        theirs = await stack.generation.Cancel(cancel, metadata=((TENANT_KEY, "c"),))
        assert theirs.outcomes == [generation_pb2.CANCEL_OUTCOME_NOT_FOUND]
        ours = await stack.generation.Cancel(cancel, metadata=((TENANT_KEY, "a"),))
        assert ours.outcomes == [generation_pb2.CANCEL_OUTCOME_CANCELLED]
        call.cancel()
        await stack.assert_quiescent()


async def test_a_wrong_tenant_name_is_named():
    async with e2e.serve() as stack:
        reply = await answer(stack, e2e.request([1], 1), "x" * 65)
        assert reply.code is grpc.StatusCode.INVALID_ARGUMENT
        assert TENANT_KEY in reply.message


@pytest.mark.parametrize(
    ("ordering", "priority", "code"),
    [
        (Ordering.PRIORITY, 5, grpc.StatusCode.OK),
        (Ordering.PRIORITY, 1001, grpc.StatusCode.INVALID_ARGUMENT),
        (Ordering.FCFS, 1, grpc.StatusCode.INVALID_ARGUMENT),
        (Ordering.FCFS, 0, grpc.StatusCode.OK),
    ],
)
async def test_priorities_need_a_server_that_orders_by_them(ordering, priority, code):
    async with e2e.serve(ordering=ordering) as stack:
        message = e2e.request([1, 2], 2)
        message.scheduling.priority = priority
        reply = await stack.answer(message)
        assert reply.code is code
        if code is not grpc.StatusCode.OK:
            assert "scheduling.priority" in reply.message
