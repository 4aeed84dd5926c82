"""Ownership and resume (rule 7 of the precise semantics)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from stepahead.v1 import worker_pb2
from tests.conformance.double import Scheduler, connect, serve
from tests.conformance.test_boundaries import standing_device
from tests.worker.fakes import FakeRunner
from tests.worker.plans import plan, start

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def resume(opened: worker_pb2.SessionOpened, last_completed: int, **fields: Any) -> dict[str, Any]:
    """Fields of an OpenSession that continues a session on generation 2."""
    session = worker_pb2.SessionResume(session_id=opened.session_id, last_completed_step_id=last_completed)
    return {"resume": session, "stream_generation": 2} | fields


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"protocol_major": 2}, PRECONDITION, "PROTOCOL_MISMATCH"),
        ({"protocol_major": 0}, PRECONDITION, "PROTOCOL_MISMATCH"),
        ({"model_fingerprint": "other"}, PRECONDITION, "MODEL_MISMATCH"),
        ({"scheduler_instance_id": ""}, INVALID, "INVALID_FIELD"),
        ({"scheduler_epoch": 0}, INVALID, "INVALID_FIELD"),
        ({"stream_generation": 0}, INVALID, "INVALID_FIELD"),
        ({"overlap_depth": 3}, INVALID, "INVALID_FIELD"),
        ({"resume": worker_pb2.SessionResume(session_id=5)}, PRECONDITION, "UNKNOWN_SESSION"),
    ],
)
async def test_sessions_that_cannot_be_opened_say_why(
    fields: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.send_open(**fields)
        end = await scheduler.end()
        assert (end.code, end.reason) == (code, reason)
        await Scheduler(stub).open(model_fingerprint="f" * 64)


async def test_the_answer_names_worker_and_session() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        opened = await Scheduler(stub).open(overlap_depth=2)
        assert opened.session_id > 0
        assert opened.worker_instance_id == info.worker_instance_id
        assert (opened.worker_epoch, opened.overlap_depth, opened.resume_grace_ns) == (1, 2, 10**10)
        assert (opened.last_completed_step_id, opened.last_accepted_step_id) == (0, 0)


async def test_another_scheduler_waits_for_the_lease() -> None:
    async with serve(FakeRunner, resume_grace_ns=50_000_000) as server, connect(server) as stub:
        owner = Scheduler(stub)
        opened = await owner.open()
        for fields in ({}, {"scheduler_epoch": 9}, resume(opened, 0)):
            other = Scheduler(stub)
            await other.send_open(**({"scheduler_instance_id": "scheduler-b"} | fields))
            end = await other.end()
            assert (end.code, end.reason) == (PRECONDITION, "WORKER_OWNED")
        owner.cancel()
        while True:  # refused until the lease has run out
            other = Scheduler(stub)
            await other.send_open(scheduler_instance_id="scheduler-b")
            message = await other.read_or_end()
            if message is not None:
                break
            assert (await other.end()).reason == "WORKER_OWNED"
            await asyncio.sleep(0.01)
        assert message.opened.worker_epoch == 2
        late = Scheduler(stub)
        await late.send_open(**resume(opened, 0))
        assert (await late.end()).reason == "WORKER_OWNED"


async def test_a_closed_session_frees_the_worker_at_once() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        owner = Scheduler(stub)
        opened = await owner.open()
        await owner.plans(start(1, 0, [1, 2]))
        await owner.boundary()
        await owner.send(close=worker_pb2.CloseSession(reason="done"))
        assert (await owner.end()).code == grpc.StatusCode.OK
        late = Scheduler(stub)
        await late.send_open(**resume(opened, 1))
        assert (await late.end()).reason == "UNKNOWN_SESSION"
        other = Scheduler(stub)
        await other.open(scheduler_instance_id="scheduler-b")
        await other.plans(start(1, 0, [3, 4]))  # slot 0 and step 1 are free again
        assert (await other.boundary()).completed_step_id == 1


async def test_a_larger_epoch_of_the_same_scheduler_takes_over() -> None:
    """O2."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        old = Scheduler(stub)
        await old.open()
        await old.plans(start(1, 0, [1, 2]))
        await old.boundary()
        for epoch in (0, 1):
            stale = Scheduler(stub)
            await stale.send_open(scheduler_epoch=epoch)
            assert (await stale.end()).code in (PRECONDITION, INVALID)
        new = Scheduler(stub)
        opened = await new.open(scheduler_epoch=2)
        assert (opened.worker_epoch, opened.last_accepted_step_id) == (2, 0)
        end = await old.end()
        assert (end.code, end.reason) == (grpc.StatusCode.ABORTED, "SESSION_SUPERSEDED")
        await new.plans(start(1, 0, [1, 2]))
        assert (await new.boundary()).worker_epoch == 2


async def test_a_stale_epoch_is_refused_by_name() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        await Scheduler(stub).open(scheduler_epoch=4)
        again = Scheduler(stub)
        await again.send_open(scheduler_epoch=4)
        assert (await again.end()).reason == "STALE_EPOCH"


async def test_a_broken_stream_is_resumed_where_it_stood() -> None:
    """Boundaries above the scheduler's are sent again, plans above the accepted one are taken."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        first = Scheduler(stub)
        opened = await first.open()
        await first.plans(start(1, 0, [1, 2]), plan(2, decode=1, committed=0))
        boundaries = [await first.boundary(), await first.boundary()]
        first.cancel()
        second = Scheduler(stub)
        resumed = await second.open(**resume(opened, 1))
        assert (resumed.session_id, resumed.worker_epoch) == (opened.session_id, opened.worker_epoch)
        assert (resumed.last_completed_step_id, resumed.last_accepted_step_id) == (2, 2)
        again = await second.boundary()
        assert again.completion == boundaries[1].completion
        await second.plans(plan(3, decode=1))
        assert (await second.boundary()).completed_step_id == 3


async def test_a_step_that_ends_while_the_stream_is_broken_is_not_lost() -> None:
    async with standing_device(1) as (first, runner):
        stub = first.stub
        await first.plans(start(1, 0, [1, 2]))
        await first.ping()
        first.cancel()
        runner.allow_forward()
        runner.allow_sample()
        second = Scheduler(stub)
        resumed = await second.open(**resume(first.opened, 0))
        assert resumed.last_accepted_step_id == 1
        assert (await second.boundary()).completed_step_id == 1


async def test_two_streams_of_one_session_execute_a_plan_once() -> None:
    """B1, rule 7: the fence is the stream generation, not luck."""
    runner = FakeRunner()
    async with serve(lambda: runner) as server, connect(server) as stub:
        old = Scheduler(stub)
        opened = await old.open()
        await old.plans(start(1, 0, [1, 2]))
        await old.boundary()
        new = Scheduler(stub)
        await new.open(**resume(opened, 1))
        await old.send_late(plan=plan(2, decode=1))
        await new.plans(plan(2, decode=1))
        assert (await new.boundary()).completed_step_id == 2
        end = await old.end()
        # The late plan may have met a stream that had ended and that nobody had read.
        assert end.is_hidden or (end.code, end.reason) == (grpc.StatusCode.ABORTED, "SESSION_SUPERSEDED")
        await new.plans(plan(2, decode=1))
        assert (await new.rejected()).reason == worker_pb2.StepRejected.REASON_ALREADY_EXECUTED
        await new.plans(plan(4, decode=1))
        assert (await new.rejected()).reason == worker_pb2.StepRejected.REASON_NOT_NEXT
        for generation in (1, 2):
            stale = Scheduler(stub)
            await stale.send_open(**resume(opened, 2, stream_generation=generation))
            assert (await stale.end()).reason == "STALE_GENERATION"
        assert [batch.step_id for batch in runner.batches] == [1, 2]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"scheduler_epoch": 1}, "STALE_EPOCH"), ({"scheduler_epoch": 3}, "UNKNOWN_SESSION")],
)
async def test_a_resume_of_another_epoch_is_refused(fields: dict[str, Any], reason: str) -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        opened = await Scheduler(stub).open(scheduler_epoch=2)
        other = Scheduler(stub)
        await other.send_open(**resume(opened, 0, **fields))
        assert (await other.end()).reason == reason


@pytest.mark.parametrize("last_completed", [0, 3])
async def test_boundaries_that_cannot_be_sent_again_are_not_promised(last_completed: int) -> None:
    """Boundaries are kept until a plan's committed_through covers them."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        first = Scheduler(stub)
        opened = await first.open()
        await first.plans(start(1, 0, [1, 2]))
        await first.boundary()
        await first.plans(plan(2, decode=1, committed=1))
        await first.boundary()
        second = Scheduler(stub)
        await second.send_open(**resume(opened, last_completed))
        end = await second.end()
        assert (end.code, end.reason) == (PRECONDITION, "BOUNDARY_UNAVAILABLE")


async def test_an_expired_session_frees_its_slots() -> None:
    async with serve(FakeRunner, resume_grace_ns=0) as server, connect(server) as stub:
        first = Scheduler(stub)
        opened = await first.open()
        await first.plans(start(1, 0, [1, 2]))
        await first.boundary()
        await first.half_close()
        assert (await first.end()).code == grpc.StatusCode.OK
        second = Scheduler(stub)
        await second.send_open(**resume(opened, 1))
        assert (await second.end()).reason == "UNKNOWN_SESSION"
        third = Scheduler(stub)
        await third.open(scheduler_epoch=2)
        await third.plans(start(1, 0, [1, 2]))
        assert (await third.boundary()).completed_step_id == 1
