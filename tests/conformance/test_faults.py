"""A dead device or host thread is never a silent hang (rule 7, O5)."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from stepahead.v1 import worker_pb2
from stepahead.worker.runner import Runner, StepBatch, StepSamples
from tests.conformance.double import Scheduler, connect, serve
from tests.worker.fakes import BrokenRunner, FakeRunner, HandClockRunner
from tests.worker.plans import plan, start


class NonsenseRunner(FakeRunner):
    """Answers with a status that does not exist: the host thread fails on it."""

    def sample(self, batch: StepBatch) -> StepSamples:
        return StepSamples(
            np.zeros(len(batch.sample_rows), np.int64), np.full(len(batch.sample_rows), 77, np.uint8)
        )


@pytest.mark.parametrize(
    ("runner", "cause"), [(BrokenRunner(1), "ValueError in step 1"), (NonsenseRunner(), "ValueError in step 1")]
)
async def test_a_failed_thread_fails_the_epoch_and_the_process(runner: Runner, cause: str) -> None:
    async with serve(lambda: runner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(start(1, 0, [1, 2]))
        failed = (await scheduler.read("failed")).failed
        assert (failed.step_id, failed.scope) == (1, worker_pb2.StepFailed.SCOPE_EPOCH)
        assert failed.message.startswith(cause)
        assert "secret" not in failed.message
        end = await scheduler.end()
        assert (end.code, end.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert end.message.startswith("internal error, incident ")
        await server.wait_failed()


async def test_a_step_that_hangs_fails_the_epoch() -> None:
    """max_step_ns counts from the step's start, on the device."""
    runner = HandClockRunner()

    def let_go() -> None:
        runner.allow_forward(100)
        runner.allow_sample(100)

    async with serve(lambda: runner, release=let_go) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(start(1, 0, [1, 2], max_step_ns=30_000_000))
        failed = (await scheduler.read("failed")).failed
        assert failed.message.startswith("StepTimeout in step 1")
        await server.wait_failed()


async def test_a_gate_that_is_late_is_no_hang() -> None:
    """Waiting for a gate is healthy however long it takes: it is not the device's time."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        message = start(1, 0, [1, 2], max_step_ns=300_000_000, gate_wait_ns=400_000_000)
        message.admissions[0].constrained = True
        await scheduler.plans(message)
        boundary = await scheduler.boundary()
        assert boundary.completion.row_errors[0].code == worker_pb2.RowError.CODE_GATE_MISSING
        assert boundary.completion.timings.sample_wait_ns >= 400_000_000


async def test_a_bad_plan_fails_nothing() -> None:
    """O7: a validation error is never an assertion in the step loop."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        huge = 2**32 - 1
        await scheduler.plans(
            plan(1, rows=[(huge, huge, huge, True)], released_slots=[huge], released_incarnations=[2**64 - 1])
        )
        assert (await scheduler.rejected()).reason == worker_pb2.StepRejected.REASON_INVALID
        await scheduler.plans(plan(1, total_rows=huge, total_tokens=huge, max_step_ns=2**64 - 1))
        assert (await scheduler.rejected()).reason == worker_pb2.StepRejected.REASON_INVALID
        await scheduler.plans(start(1, 0, [1, 2], max_step_ns=2**64 - 1, gate_wait_ns=2**64 - 1))
        assert (await scheduler.boundary()).completed_step_id == 1
