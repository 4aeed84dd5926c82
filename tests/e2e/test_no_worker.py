"""New requests while the only worker is away: they wait for it as accepted ones do, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from stepahead.cli.failures import describe
from stepahead.client import AsyncClient, DeadlineError
from stepahead.scheduler import worker_link
from stepahead.scheduler.constraints.compiler import CompiledConstraint
from stepahead.scheduler.errors import FieldViolation, InvalidRequest
from stepahead.scheduler.live_request import LiveRequest
from stepahead.scheduler.worker_link import LinkState
from stepahead.v1 import generation_pb2, operations_pb2
from tests.e2e.processes import free_port
from tests.e2e.stack import Stack, eventually, fold, request, serve_scheduler, serve_worker
from tests.e2e.tagged_oracle import expected

pytestmark = pytest.mark.e2e

MODEL = "toy:tagged"


@asynccontextmanager
async def without_its_worker(**fields: Any) -> AsyncIterator[tuple[Stack, int]]:
    """A scheduler that had a worker, and the port where it looks for it."""
    port = free_port()
    async with AsyncExitStack() as exits, AsyncExitStack() as exit_worker:
        # A worker that still loads would be asked again seconds later.
        await exit_worker.enter_async_context(serve_worker(MODEL, port=port))
        stack = await exits.enter_async_context(serve_scheduler(f"127.0.0.1:{port}", **fields))
        await eventually(lambda: bool(stack.server.engine.links))
        await exit_worker.aclose()
        await eventually(lambda: not stack.server.engine.links)
        yield stack, port


async def waiting(stack: Stack, count: int) -> None:
    """Until this many newcomers wait."""

    async def is_so() -> bool:
        return (await stack.status()).num_waiting == count

    await eventually(is_so)


async def test_newcomers_wait_for_the_worker_to_come_back() -> None:
    """O1, O4: nobody is refused, however long the worker has been away; readiness says that nothing runs."""
    messages = [request([index, 7], 20, request_id=f"r{index}") for index in range(5)]
    async with without_its_worker(lane_wait_s=0.0) as (stack, port):
        answers = [asyncio.create_task(stack.answer(message)) for message in messages[:4]]
        multiplex: Any = stack.generation.Multiplex()
        submit = generation_pb2.MultiplexSubmit(handle=1, request=messages[4])
        await multiplex.write(generation_pb2.MultiplexRequest(submit=submit))
        await multiplex.done_writing()
        await waiting(stack, 5)
        status = await stack.status()
        assert (status.state, status.num_running) == (operations_pb2.SCHEDULER_STATE_NOT_READY, 0)
        assert status.totals.requests_accepted == 5
        async with serve_worker(MODEL, port=port):
            for message, task in zip(messages, answers, strict=False):
                answer = await task
                assert answer.ok, answer
                assert answer.token_ids == expected(message)
            async for response in multiplex:
                assert not response.failures
            await stack.assert_quiescent()
            assert (await stack.status()).totals.requests_finished == 5


async def test_a_newcomer_waits_no_longer_than_it_may() -> None:
    """F8, O1: its own deadlines and the server's option."""
    async with without_its_worker() as (stack, _):
        queue: dict[str, Any] = {"queue_timeout_ms": 20}
        for timeouts in ({"timeout_ms": 20}, queue, {"timeout_ms": 60_000} | queue):
            late = await stack.answer(request([1], 1, **timeouts))
            assert (late.code, late.error_info.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
            assert late.error_info.metadata == {"phase": "queue", "output_tokens": "0", "worker": "none"}
        async with AsyncClient(stack.server.address) as client:
            with pytest.raises(DeadlineError, match="phase queue after 0 tokens: no worker is ready") as caught:
                await client.generate([1], timeout=0.02, text=False)
        assert describe(caught.value).endswith(
            "(it waited for a worker, `stepahead status` shows them; --timeout and --queue-timeout allow more)"
        )
        totals = (await stack.status()).totals
        assert (totals.requests_accepted, totals.requests_failed) == (4, 4)
    for wait_s in (0.02, 0.0):
        async with without_its_worker(worker_wait_s=wait_s) as (stack, _):
            refused = await stack.generate([1], 1)
            assert (refused.code, refused.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")


async def test_who_gets_no_worker_hears_that_one_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: a worker that came back as another one is named for as long as it is there."""
    monkeypatch.setattr(worker_link, "REFUSED_BACKOFF_S", 0.05)
    port = free_port()
    address = f"127.0.0.1:{port}"
    why = f"the worker at {address} was refused: its max_model_len is 128, not 256"
    async with AsyncExitStack() as exits, AsyncExitStack() as exit_good, AsyncExitStack() as exit_bad:
        good = await exit_good.enter_async_context(serve_worker(MODEL, step_s=0.01))
        fields: dict[str, Any] = {"lane_wait_s": 0.05, "worker_wait_s": 0.05}
        stack = await exits.enter_async_context(serve_scheduler(good.address, address, **fields))
        await eventually(lambda: bool(stack.server.engine.links))
        await exit_bad.enter_async_context(serve_worker(MODEL, port=port, max_model_len=128))
        _, link = stack.server.cluster.links
        await eventually(lambda: bool(link.refusal))
        running = asyncio.create_task(stack.generate([1], 200))
        await eventually(lambda: stack.server.engine.core.num_running == 1)
        await exit_good.aclose()
        lost, late, expired = (
            await running,
            await stack.generate([1], 1),
            await stack.generate([1], 1, timeout_ms=9),
        )
        assert lost.message == f"the worker was lost and none came back in time: {why}"
        assert late.message == f"no worker is ready; waited 0.05 s for one: {why}"
        assert expired.message == f"the deadline passed in phase queue after 0 tokens: no worker is ready: {why}"
        await exit_bad.aclose()
        await eventually(lambda: not link.refusal)
        assert (await stack.generate([1], 1)).message == "no worker is ready; waited 0.05 s for one"


async def test_no_more_newcomers_wait_than_the_queue_holds() -> None:
    """F8: each choice takes a place."""
    async with without_its_worker(max_waiting_requests=3) as (stack, _):
        held = stack.open(request([1], 1, num_choices=2))
        await waiting(stack, 2)
        full = await stack.generate([1], 1, num_choices=2)
        assert (full.code, full.error_info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        fits = stack.open(request([1], 1))
        await waiting(stack, 3)
        for call in (held, fits):
            call.cancel()
        await waiting(stack, 0)


async def test_a_cancel_ends_the_wait() -> None:
    """F1, F4: it answers at once."""
    async with without_its_worker() as (stack, _):
        named = asyncio.create_task(stack.answer(request([1], 1, request_id="named")))
        await waiting(stack, 1)
        cancelled = await stack.generation.Cancel(generation_pb2.CancelRequest(request_ids=["named"]))
        assert cancelled.outcomes == [generation_pb2.CANCEL_OUTCOME_CANCELLED]
        assert (await named).code is grpc.StatusCode.CANCELLED
        await waiting(stack, 0)


async def test_a_drain_waits_for_newcomers_and_their_worker() -> None:
    """O6: they were accepted, so they may finish, as those in the core's queue may."""
    messages = [request([index, 7], 20) for index in range(2)]
    async with without_its_worker(drain_timeout_s=30.0) as (stack, port):
        answers = [asyncio.create_task(stack.answer(message)) for message in messages]
        await waiting(stack, 2)
        stopping = asyncio.create_task(stack.server.stop())
        await eventually(lambda: stack.server.front_end.draining)
        late = await stack.generate([1], 1)
        assert (late.code, late.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        async with serve_worker(MODEL, port=port):
            for message, task in zip(messages, answers, strict=True):
                answer = await task
                assert answer.ok, answer
                assert answer.token_ids == expected(message)
            assert await stopping == 0


async def test_newcomers_that_a_drain_cannot_serve_are_told_and_counted() -> None:
    """O6: the drain's time, a worker that does not come, a second signal end them; a cancel is their own end."""
    async with without_its_worker() as (stack, _):
        held = asyncio.create_task(stack.generate([1], 1))
        cancelled = asyncio.create_task(stack.answer(request([1], 1, request_id="named")))
        await waiting(stack, 2)
        drain = asyncio.ensure_future(stack.operations.Drain(operations_pb2.DrainRequest(timeout_ms=200)))
        await eventually(lambda: stack.server.front_end.draining)
        await stack.generation.Cancel(generation_pb2.CancelRequest(request_ids=["named"]))
        assert ((await drain).finished, (await drain).cancelled) == (1, 1)
        assert (await cancelled).code is grpc.StatusCode.CANCELLED
        assert ((await held).code, (await held).error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    async with without_its_worker(worker_wait_s=0.2, drain_timeout_s=30.0) as (stack, _):
        held = asyncio.create_task(stack.generate([1], 1))
        await waiting(stack, 1)
        assert await stack.server.stop() == 1
        assert (await held).error_info.reason == "NOT_READY"
    async with without_its_worker(drain_timeout_s=30.0) as (stack, _):
        held = asyncio.create_task(stack.generate([1], 1))
        await waiting(stack, 1)
        stopping = asyncio.create_task(stack.server.stop())
        await eventually(lambda: stack.server.front_end.draining)
        stack.server.drainer.hurry()
        assert await stopping == 0
        assert (await held).error_info.reason == "DRAINING"


async def test_newcomers_are_listed_and_hear_that_they_wait() -> None:
    """F3, J5: accepted, in phase queue, and found again after a lost connection."""
    message = request([3, 7], 4, request_id="early", reattach_window_ms=60_000)
    async with without_its_worker(keepalive_s=0.01) as (stack, port):
        call: Any = stack.open(message)
        first = await call.read()
        assert [event.keepalive.phase for event in first.events] == [generation_pb2.Keepalive.PHASE_QUEUED]
        (listed,) = (await stack.operations.ListRequests(operations_pb2.ListRequestsRequest())).requests
        assert (listed.request_id, listed.state, listed.prompt_tokens) == ("early", "waiting", 2)
        assert (listed.output_tokens, listed.worker_address) == (0, "")
        call.cancel()  # as a connection that breaks
        attached: Any = stack.generation.Attach(generation_pb2.AttachRequest(request_id="early"))
        async with serve_worker(MODEL, port=port):
            answer = await fold(attached)
        assert answer.ok, answer
        assert answer.token_ids == expected(message)


async def test_a_newcomer_that_the_core_refuses_ends_with_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: what is too much depends on the worker that comes; the others go on."""
    async with without_its_worker() as (stack, port):
        engine = stack.server.engine
        accept = engine.submit

        def submit(live: LiveRequest, compiled: CompiledConstraint | None = None) -> None:
            if len(live.accepted.prompt_token_ids) == 9:
                raise InvalidRequest([FieldViolation("stopping.max_tokens", "too much")])
            accept(live, compiled)

        monkeypatch.setattr(engine, "submit", submit)
        greedy = asyncio.create_task(stack.generate([1] * 9, 200))
        await waiting(stack, 1)
        modest = asyncio.create_task(stack.generate([1], 2))
        await waiting(stack, 2)
        async with serve_worker(MODEL, port=port):
            refused = await greedy
            assert (refused.code, refused.token_ids) == (grpc.StatusCode.INVALID_ARGUMENT, [])
            assert (await modest).ok
            await stack.assert_quiescent()


async def test_a_request_on_a_worker_that_is_away_counts_as_waiting() -> None:
    """E4: it may still come back with everything it had, but nothing runs meanwhile."""
    async with AsyncExitStack() as exits:
        worker = await exits.enter_async_context(serve_worker(MODEL, step_s=0.01))
        stack = await exits.enter_async_context(serve_scheduler(worker.address))
        await eventually(lambda: bool(stack.server.engine.links))
        held = stack.open(request([1], 200))
        await eventually(lambda: stack.server.engine.core.num_running == 1)
        (link,) = stack.server.engine.links.values()
        link.state = LinkState.RESUMING
        status = await stack.status()
        assert (status.num_running, status.num_waiting) == (0, 1)
        (listed,) = (await stack.operations.ListRequests(operations_pb2.ListRequestsRequest())).requests
        assert (listed.state, listed.worker_address) == ("waiting", worker.address)
        link.state = LinkState.OPEN
        status = await stack.status()
        assert (status.num_running, status.num_waiting) == (1, 0)
        held.cancel()
