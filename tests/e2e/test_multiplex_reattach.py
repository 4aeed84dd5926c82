"""A Multiplex stream behind a proxy that cuts its connections, on a real scheduler (D9, P1)."""

from __future__ import annotations

import pytest

from stepahead.client import AsyncClient, GenerationRequest, UnavailableError
from stepahead.v1 import generation_pb2
from tests.e2e.flaky_network import flaky
from tests.e2e.stack import BOUND_S, eventually, serve
from tests.e2e.tagged_oracle import continuation

pytestmark = pytest.mark.e2e

NUM_REQUESTS, NUM_TOKENS = 24, 40


async def test_d9_p1_many_requests_survive_cuts_without_a_gap() -> None:
    """Plain columns and events alike; what was waiting for a slot goes on too."""
    requests = [
        GenerationRequest(
            prompt=[index, 7],
            max_tokens=NUM_TOKENS,
            temperature=1.0,
            seed=index,
            text=False,
            logprobs=None,
            num_choices=1 + index % 2,
        )
        for index in range(NUM_REQUESTS)
    ]
    async with (
        serve(worker={"step_s": 0.003, "max_num_seqs": 16}) as stack,
        flaky(stack.server.address) as (proxy, address),
        AsyncClient(address) as client,
        client.multiplex() as session,
    ):
        handles = [await session.submit(each) for each in requests]
        tokens: dict[int, list[int]] = {handle: [] for handle in handles}
        answers = {}
        num_deltas = 0
        async for update in session:
            assert update.error is None
            for delta in update.deltas:
                num_deltas += 1
                if delta.choice_index == 0:
                    assert delta.first_token_index == len(tokens[update.handle])
                    tokens[update.handle] += delta.token_ids
                if num_deltas in (1, 2, 40, 300, 700):
                    proxy.reset()
            if update.completion is not None:
                answers[update.handle] = update.completion
            if session.num_live == 0:
                break
        assert proxy.num_resets >= 3, "a cut may find no connection"
        await eventually(
            lambda: (
                not stack.server.front_end.live
                or all(live.is_over for live in stack.server.front_end.live.values())
            )
        )
    for index, handle in enumerate(handles):
        expected = continuation([index, 7], NUM_TOKENS, temperature=1.0, seed=index)
        assert tokens[handle] == list(answers[handle].token_ids) == expected


async def test_a_request_that_the_server_forgot_ends_and_leaves_the_stream() -> None:
    async with (
        serve(worker={"step_s": 0.003}) as stack,
        flaky(stack.server.address) as (proxy, address),
        AsyncClient(address) as client,
        client.multiplex() as session,
    ):
        kept = await session.submit([1, 2], max_tokens=NUM_TOKENS, temperature=0, text=False)
        lost = await session.submit([1, 3], max_tokens=250, request_id="lost", text=False)
        ends = {}
        async for update in session:
            if update.handle == lost and update.started:
                proxy.is_open = False
                proxy.reset()
                await eventually(
                    lambda: all(not live.subscriptions for live in stack.server.front_end.live.values())
                )
                cancel = generation_pb2.CancelRequest(request_ids=["lost"])
                await stack.generation.Cancel(cancel, timeout=BOUND_S)
                proxy.is_open = True
            if update.ended:
                ends[update.handle] = update
            if session.num_live == 0:
                break
    assert isinstance(ends[lost].error, UnavailableError)
    assert list(ends[kept].completion.token_ids) == continuation([1, 2], NUM_TOKENS)
