"""The Python client behind a proxy that cuts its connections, on a real scheduler (D9, P3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from stepahead.client import AsyncClient, Client, Completion, Delta, GenerationRequest, UnavailableError
from stepahead.scheduler import engine
from stepahead.scheduler.convert import result_from_proto
from stepahead.scheduler.core import StepResult, TokenLogprobs
from stepahead.v1 import worker_pb2
from tests.e2e.flaky_network import FlakyProxy, flaky
from tests.e2e.stack import Stack, eventually, serve

pytestmark = pytest.mark.e2e

NUM_TOKENS = 24
REQUEST = GenerationRequest(
    prompt="Small", max_tokens=NUM_TOKENS, num_choices=2, temperature=3.0, seed=5, ignore_eos=True, logprobs=1
)
CUTS = [(0,), (1,), (7,), (NUM_TOKENS - 1,), (2, 3, 12, 20)]


def with_logprobs(boundary: worker_pb2.StepBoundary) -> StepResult:
    """What a worker without log probabilities said, with some that can be told apart."""
    result = result_from_proto(boundary)
    if result.logprobs or result.token_counts:
        return result
    return replace(
        result,
        logprobs={
            incarnation: TokenLogprobs(
                first_position=0,
                token_logprobs=(-token_id / 8,),
                ranks=(1 + token_id,),
                top_counts=(1,),
                top_token_ids=(token_id,),
                top_logprobs=(-token_id / 8,),
            )
            for incarnation, token_id in zip(result.incarnations, result.token_ids, strict=True)
        },
    )


@asynccontextmanager
async def behind_proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Stack, FlakyProxy, str]]:
    """A stack whose steps take 5 ms, its proxy, and the proxy's address."""
    monkeypatch.setattr(engine, "result_from_proto", with_logprobs)
    model, worker = "toy:score-table?loop=help", {"step_s": 0.005}
    async with serve(model, worker=worker) as stack, flaky(stack.server.address) as (proxy, address):
        yield stack, proxy, address


def assert_whole(completion: Completion, deltas: list[Delta], expected: Completion) -> None:
    """Nothing is missing, nothing came twice, whether taken together or one by one."""
    assert completion.choices == expected.choices
    for choice in completion.choices:
        mine = [each for each in deltas if each.choice_index == choice.index]
        assert tuple(token_id for each in mine for token_id in each.token_ids) == choice.token_ids
        assert "".join(each.text for each in mine) == choice.text
        logprobs = tuple(entry for each in mine for entry in each.logprobs)
        assert logprobs == choice.logprobs
        if choice.token_ids and logprobs:
            assert [entry.token_id for entry in logprobs] == list(choice.token_ids)


async def test_d9_p3_an_async_stream_survives_cuts_at_any_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with behind_proxy(monkeypatch) as (stack, proxy, address), AsyncClient(address) as client:
        expected = await client.generate(REQUEST)
        assert expected.choices[0].token_ids != expected.choices[1].token_ids
        assert all(len(choice.logprobs) == NUM_TOKENS for choice in expected.choices)
        for cuts in CUTS:
            waiting, deltas = list(cuts), []
            async with client.stream(REQUEST) as stream:
                await eventually(lambda stream=stream: ("", stream.request_id) in stack.server.front_end.live)
                while True:
                    if waiting and len(stream.token_ids) >= waiting[0]:
                        waiting.pop(0)
                        proxy.reset()
                    try:
                        deltas.append(await anext(stream))
                    except StopAsyncIteration:
                        break
                assert_whole(await stream.completion(), deltas, expected)
        assert proxy.num_resets >= sum(map(len, CUTS))
        # One run each, and nothing that goes on.
        totals = (await stack.status()).totals
        assert (totals.requests_accepted, totals.requests_finished) == (1 + len(CUTS), 1 + len(CUTS))


async def test_d9_p3_a_blocking_stream_survives_cuts_at_any_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with behind_proxy(monkeypatch) as (_, proxy, address):
        loop = asyncio.get_running_loop()

        def read() -> None:
            with Client(address) as client:
                expected = client.generate(REQUEST)
                for cuts in CUTS:
                    waiting, deltas = list(cuts), []
                    with client.stream(REQUEST) as stream:
                        for delta in stream:
                            deltas.append(delta)
                            if waiting and len(stream.token_ids) >= waiting[0]:
                                waiting.pop(0)
                                loop.call_soon_threadsafe(proxy.reset)
                        assert_whole(stream.completion(), deltas, expected)

        await asyncio.to_thread(read)
        assert proxy.num_resets >= sum(map(len, CUTS))


@pytest.mark.parametrize("final_only", [False, True])
async def test_text_alone_and_one_delta_at_the_end_survive_cuts(
    monkeypatch: pytest.MonkeyPatch, final_only: bool
) -> None:
    request = replace(REQUEST, token_ids=False, final_only=final_only, stop=["help help help!"])
    async with behind_proxy(monkeypatch) as (stack, proxy, address), AsyncClient(address) as client:
        expected = await client.generate(request)
        assert len(expected.text) > 50

        async def cut() -> None:
            num_tokens = 2
            while num_tokens < NUM_TOKENS:
                live = [each for each in stack.server.front_end.live.values() if not each.is_over]
                is_connected = proxy.num_connections > proxy.num_resets
                if live and is_connected and len(live[0].choices[0].log.token_ids) >= num_tokens:
                    proxy.reset()
                    num_tokens += 6
                await asyncio.sleep(0.001)

        cutting = asyncio.create_task(cut())
        async with client.stream(request) as stream:
            deltas = [delta async for delta in stream]
            assert_whole(await stream.completion(), deltas, expected)
        assert proxy.num_resets >= 2
        cutting.cancel()


async def test_f6_a_stream_left_early_ends_its_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a cut, although the request may outlive its stream by 30 s."""
    async with behind_proxy(monkeypatch) as (stack, proxy, address), AsyncClient(address) as client:
        for is_cut in (False, True):
            async with client.stream("Small", max_tokens=250, ignore_eos=True) as stream:
                await anext(stream)
                if is_cut:
                    proxy.reset()
                    num_tokens = len(stream.token_ids)
                    while len(stream.token_ids) == num_tokens:
                        await anext(stream)
            await eventually(lambda: not stack.server.engine.book.requests)
        assert (await stack.status()).totals.requests_cancelled == 2


async def test_nobody_comes_back_for_a_request_after_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    async with behind_proxy(monkeypatch) as (stack, proxy, address), AsyncClient(address) as client:
        stream = client.stream("Small", max_tokens=250, ignore_eos=True, reattach_window=0.2)
        await stream.__aenter__()
        await anext(stream)
        proxy.is_open = False
        proxy.reset()
        await eventually(lambda: not stack.server.engine.book.requests)
        proxy.is_open = True
        with pytest.raises(UnavailableError):
            await stream.completion()
