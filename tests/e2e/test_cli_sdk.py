"""The Python client on the real services that `stepahead up` would start, with toy models."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView
from stepahead.client import (
    AsyncClient,
    CancelOutcome,
    Client,
    GenerationRequest,
    InvalidRequestError,
    MultiplexUpdate,
    RequestCancelledError,
    ServerStatus,
)

pytestmark = pytest.mark.e2e

Body = Callable[[AsyncClient], Awaitable[None]]


async def with_stack(folder: Path, options: StackOptions, body: Body) -> None:
    async def serve(ready: StackReady) -> None:
        async with AsyncClient(ready.address) as client:
            await client.wait_until_ready()
            await body(client)

    view = ConsoleView(Console(quiet=True))
    await run_stack(Stack(options, view, log_dir=folder), serve)


async def until_idle(client: AsyncClient) -> ServerStatus:
    """Waits until every slot and block is back; the test's own time limit bounds it."""
    while True:
        status = await client.status()
        busy = sum(
            worker.slots.owned + worker.slots.quarantined + worker.blocks.owned + worker.blocks.quarantined
            for worker in status.workers
        )
        if busy == 0 and status.num_running == 0 and status.num_waiting == 0:
            return status
        await asyncio.sleep(0.05)


def mixed_requests(*, text: bool) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=[(index * 7 + position) % 200 for position in range(1 + index % 23)],
            max_tokens=1 + index % 17,
            temperature=0.0 if index % 3 else 0.8,
            seed=index,
            text=text,
        )
        for index in range(40)
    ]


@pytest.mark.parametrize("overlap", ["on", "off"])
async def test_b11_multiplex_and_generate_deliver_the_same_tokens(tmp_path: Path, overlap: str):
    async def body(client: AsyncClient) -> None:
        requests = mixed_requests(text=False)
        alone = await asyncio.gather(*[client.generate(request) for request in requests])
        ended: dict[int, MultiplexUpdate] = {}
        async with client.multiplex() as session:
            handles = [await session.submit(request) for request in requests]
            async for update in session:
                if update.ended:
                    ended[update.handle] = update
                if not session.num_live:
                    break
        for handle, expected in zip(handles, alone, strict=True):
            completion = ended[handle].completion
            assert completion is not None, ended[handle].error
            assert completion.token_ids == expected.token_ids
            assert completion.usage.output_tokens == expected.usage.output_tokens
        await until_idle(client)

    await with_stack(tmp_path, StackOptions(model="toy:tagged", workers=2, overlap=overlap), body)


async def test_failures_and_cancellations_of_one_handle_leave_the_others(tmp_path: Path):
    async def body(client: AsyncClient) -> None:
        expected = await client.generate([1, 2, 3], max_tokens=40, temperature=0.0, text=False)
        ended: dict[int, MultiplexUpdate] = {}
        async with client.multiplex() as session:
            bad = await session.submit([1], max_tokens=0, text=False)
            endless = await session.submit([4, 5], max_tokens=4000, text=False)
            good = await session.submit([1, 2, 3], max_tokens=40, temperature=0.0, text=False)
            async for update in session:
                if update.handle == endless and update.deltas:
                    await session.cancel([endless])
                if update.ended:
                    ended[update.handle] = update
                if not session.num_live:
                    break
        assert isinstance(ended[bad].error, InvalidRequestError)
        assert "max_tokens" in str(ended[bad].error.field)
        assert isinstance(ended[endless].error, RequestCancelledError)
        completion = ended[good].completion
        assert completion is not None
        assert completion.token_ids == expected.token_ids
        status = await until_idle(client)
        assert status.totals.requests_cancelled == 1

    await with_stack(tmp_path, StackOptions(model="toy:sleep?ms=2"), body)


async def test_f6_leaving_streams_and_cancelling_by_id_gives_everything_back(tmp_path: Path):
    async def body(client: AsyncClient) -> None:
        async with client.stream([1, 2], max_tokens=4000, text=False) as stream:
            await anext(stream)

        def leave_blocking_stream() -> None:
            with Client(client.address) as blocking, blocking.stream([1, 2], max_tokens=4000) as left:
                next(left)

        await asyncio.to_thread(leave_blocking_stream)
        async with client.stream([1, 2], max_tokens=4000, request_id="mine", text=False) as stream:
            await anext(stream)
            assert await client.cancel(["mine", "other"]) == {
                "mine": CancelOutcome.CANCELLED,
                "other": CancelOutcome.NOT_FOUND,
            }
            with pytest.raises(RequestCancelledError):
                await stream.completion()
        status = await until_idle(client)
        assert status.totals.requests_cancelled == 3
        assert (await client.generate([1, 2], max_tokens=3)).usage.output_tokens == 3

    await with_stack(tmp_path, StackOptions(model="toy:sleep?ms=2"), body)


async def test_tokenizer_calls_agree_with_generation(tmp_path: Path):
    async def body(client: AsyncClient) -> None:
        model = await client.get_model()
        assert (model.vocab_size, model.eos_token_ids, model.has_tokenizer) == (5, (4,), True)
        assert await client.detokenize([1, 2, 3, 4]) == "Small steps help"
        assert await client.tokenize("Small steps") == (0, 1, 2)
        answer = await client.generate("Small", max_tokens=8, temperature=0.0, stop=" help")
        assert (answer.text, answer.matched) == ("steps", " help")
        assert answer.usage.prompt_tokens == 2

    await with_stack(tmp_path, StackOptions(model="toy:score-table"), body)
