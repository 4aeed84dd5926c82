"""FlushSteps and recorded steps, against a worker that is played by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from stepahead.v1 import operations_pb2, worker_pb2
from tests.conformance.scripted_worker import serve_script
from tests.conformance.test_scheduler_link import Play, oks, play, reopened
from tests.e2e.stack import eventually, serve_scheduler


def flush(played: Play) -> asyncio.Task[operations_pb2.FlushStepsResponse]:
    async def call() -> operations_pb2.FlushStepsResponse:
        return await played.stack.operations.FlushSteps(operations_pb2.FlushStepsRequest(), timeout=20)

    return asyncio.create_task(call())


async def test_a_flush_ends_when_everything_owed_is_committed() -> None:
    """B9: the boundary behind DrainSteps is counted; a second flush finds nothing."""
    async with play() as played:
        answer = played.ask(max_tokens=1)
        plan = await played.stream.plan()
        flushing = flush(played)
        nonce = (await played.stream.command("drain")).nonce
        assert not flushing.done()
        await played.stream.complete(plan, played.stream.rows(plan), [9])
        await played.stream.send(drained=worker_pb2.Drained(nonce=nonce, last_completed_step_id=plan.step_id))
        assert (await flushing).num_boundaries == 1
        assert oks(await answer, [9])
        again = flush(played)
        await played.stream.send(drained=worker_pb2.Drained(nonce=(await played.stream.command("drain")).nonce))
        assert (await again).num_boundaries == 0


async def test_a_flush_survives_a_broken_stream() -> None:
    """The worker forgets what was read from an older stream, so the flush is sent again, behind the plans."""
    async with play() as played:
        answer = played.ask(max_tokens=1)
        plan = await played.stream.plan()
        flushing = flush(played)
        nonce = (await played.stream.command("drain")).nonce
        played.stream.end(grpc.StatusCode.UNAVAILABLE, "broken")
        stream, message = await played.worker.open()
        assert message.resume.session_id == 71
        assert (await stream.plan()).step_id == plan.step_id
        assert (await stream.command("drain")).nonce == nonce
        await stream.complete(plan, played.stream.rows(plan), [9])
        await stream.send(drained=worker_pb2.Drained(nonce=nonce, last_completed_step_id=plan.step_id))
        assert (await flushing).num_boundaries == 1
        assert oks(await answer, [9])


async def test_a_lost_session_owes_nothing() -> None:
    async with play() as played:
        flushing = flush(played)
        await played.stream.command("drain")
        gone = flush(played)
        await played.stream.command("drain")
        gone.cancel()
        played.stream.end(grpc.StatusCode.ABORTED, "another session")
        assert (await flushing).num_boundaries == 0
        await reopened(played)


async def test_without_a_session_nothing_is_owed() -> None:
    async with serve_script() as (worker, address), serve_scheduler(address) as stack:
        worker.is_loading = True
        response = await stack.operations.FlushSteps(operations_pb2.FlushStepsRequest(), timeout=20)
        assert response.num_boundaries == 0


@pytest.mark.parametrize("record_steps", [True, False])
async def test_steps_are_recorded_as_they_went_over_the_wire(record_steps: Any) -> None:
    async with play(record_steps=record_steps) as played:
        answer = played.ask([1, 2, 3], max_tokens=2)
        sent = [await played.stream.step(9), await played.stream.step(8)]
        assert oks(await answer, [9, 8])
        await eventually(lambda: played.stack.server.cluster.links[0].stats.num_boundaries == 2)
        timeline = await played.stack.operations.GetTimeline(operations_pb2.GetTimelineRequest())
        assert [record.completed_step_id for record in timeline.records] == [1, 2]
        assert [record.HasField("plan") for record in timeline.records] == [record_steps] * 2
        assert [record.HasField("boundary") for record in timeline.records] == [record_steps] * 2
        if record_steps:
            assert [record.plan for record in timeline.records] == sent
            assert [list(record.boundary.completion.token_ids) for record in timeline.records] == [[9], [8]]
