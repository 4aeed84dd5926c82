"""Gates over the wire."""

from __future__ import annotations

from typing import Any

from stepahead.v1 import worker_pb2
from stepahead.v1.worker_pb2 import SampleGate
from tests.conformance.double import Scheduler, connect, serve
from tests.conformance.test_boundaries import standing_device, stands_in
from tests.worker.fakes import FakeRunner, HandClockRunner, continuation
from tests.worker.plans import admission, plan

A_MINUTE_NS = 60_000_000_000
ONLY_TOKEN_18 = bytes([0, 0, 4, 0, 0])


def two_sequences(**fields: Any) -> worker_pb2.StepPlan:
    """Step 1: slot 0 is constrained, slot 1 is not; both sample and decode from then on."""
    return plan(
        1,
        rows=[(0, 0, 2, True), (1, 0, 2, True)],
        admissions=[admission(0, [1, 2], constrained=True), admission(1, [3, 4])],
        joined_slots=[0, 1],
        gate_wait_ns=A_MINUTE_NS,
        **fields,
    )


def gate(step_id: int, position: int, *, skip: bool = False) -> SampleGate:
    return SampleGate(
        step_id=step_id,
        slots=[0],
        incarnations=[100],
        positions=[position],
        verdicts=[SampleGate.VERDICT_SKIP if skip else SampleGate.VERDICT_MASK],
        masks=[] if skip else [ONLY_TOKEN_18],
    )


async def test_a_constrained_row_samples_under_its_mask() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(two_sequences())
        await scheduler.send(gate=gate(1, 1))
        boundary = await scheduler.boundary()
        assert list(boundary.completion.token_ids) == [18, *continuation([3, 4], 1)]


async def test_nothing_is_sampled_before_the_gate_and_pings_are_answered() -> None:
    """I1: the forward runs, sampling waits; waiting for a gate is healthy and visible."""
    async with standing_device(1) as (scheduler, runner):
        await scheduler.plans(two_sequences())
        runner.allow_forward()
        runner.allow_sample()
        await wait_for_gate(scheduler)
        await scheduler.send(gate=gate(1, 1))
        assert (await scheduler.boundary()).completion.token_ids[0] == 18


async def wait_for_gate(scheduler: Scheduler) -> None:
    """Pings until the executor says that it waits for a gate."""
    for nonce in range(10_000):
        pong = await scheduler.ping(nonce)
        if pong.waiting == worker_pb2.Pong.WAITING_GATE:
            assert pong.running_step_age_ns > 0
            return
    raise AssertionError("the executor never waited for the gate")


async def test_a_gate_overtakes_queued_plans() -> None:
    """Rule 4: with D = 2 plan N + 2 always precedes gate N + 1 on the wire; a queued gate would be a deadlock."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=2)
        waits = {"gate_wait_ns": A_MINUTE_NS, "committed": 0, "decode": 2}
        await scheduler.plans(two_sequences(), plan(2, **waits), plan(3, **waits))
        for step_id in (1, 2, 3):
            await scheduler.send(gate=gate(step_id, step_id))
            boundary = await scheduler.boundary()
            assert boundary.completed_step_id == step_id
            assert boundary.completion.token_ids[0] == 18


async def test_the_boundary_before_leaves_while_a_gate_is_waited_for() -> None:
    """The mask of N + 1 depends on the tokens of N: boundary N must not stand behind gate N + 1."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=1)
        await scheduler.plans(two_sequences(), plan(2, decode=2, committed=0, gate_wait_ns=A_MINUTE_NS))
        await scheduler.send(gate=gate(1, 1))
        assert (await scheduler.boundary()).completed_step_id == 1
        await scheduler.send(gate=gate(2, 2))
        assert (await scheduler.boundary()).completed_step_id == 2


async def test_a_missing_gate_fails_its_row_closed_and_no_other() -> None:
    """I2."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        message = two_sequences()
        message.gate_wait_ns = 0
        await scheduler.plans(message)
        completion = (await scheduler.boundary()).completion
        assert list(completion.token_counts) == [0, 1]
        assert list(completion.token_ids) == continuation([3, 4], 1)
        assert [(e.slot, e.code) for e in completion.row_errors] == [(0, worker_pb2.RowError.CODE_GATE_MISSING)]


async def test_an_ended_row_is_skipped_without_error_and_can_be_fed_again() -> None:
    """Rule 4: SKIP costs nobody a wait; rule 3: its position stays open."""
    runner = FakeRunner()
    async with serve(lambda: runner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=1)
        await scheduler.plans(two_sequences())
        await scheduler.send(gate=gate(1, 1))
        await scheduler.boundary()
        await scheduler.plans(
            plan(2, decode=2, gate_wait_ns=A_MINUTE_NS), plan(3, decode=2, committed=1, gate_wait_ns=A_MINUTE_NS)
        )
        await scheduler.send(gate=gate(2, 2, skip=True))
        skipped = (await scheduler.boundary()).completion
        assert list(skipped.token_counts) == [0, 1]
        assert not skipped.row_errors
        await scheduler.send(gate=gate(3, 3, skip=True))
        overrun = (await scheduler.boundary()).completion
        assert list(overrun.token_counts) == [0, 1]
        assert not overrun.row_errors
        await scheduler.plans(plan(4, rows=[(0, 2, 1, True)], decode=1, gate_wait_ns=A_MINUTE_NS))
        await scheduler.send(gate=gate(4, 2))
        again = (await scheduler.boundary()).completion
        assert again.token_ids[0] == 18
        assert [(position, token) for slot, position, token in runner.fed if slot == 0] == [
            (0, 1), (1, 2), (2, 18), (2, 18),
        ]  # fmt: skip


async def test_gates_are_idempotent_and_late_ones_are_dropped() -> None:
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(two_sequences())
        for _ in range(2):
            await scheduler.send(gate=gate(1, 1))
        assert (await scheduler.boundary()).completed_step_id == 1
        await scheduler.send(gate=gate(1, 1, skip=True))
        assert (await scheduler.ping()).last_completed_step_id == 1


async def test_a_gate_for_another_position_or_an_unknown_step_is_rejected() -> None:
    """I3."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(two_sequences())
        await scheduler.send(gate=gate(1, 7))
        rejected = await scheduler.rejected()
        assert (rejected.step_id, rejected.reason) == (1, worker_pb2.StepRejected.REASON_INVALID)
        assert list(rejected.violations) == ["gate.positions[0]: slot 0 feeds 1 last"]
        await scheduler.send(gate=gate(2, 2))
        assert list((await scheduler.rejected()).violations) == ["gate.step_id: step 2 was not accepted"]
        await scheduler.send(gate=gate(1, 1))
        assert (await scheduler.boundary()).completion.token_ids[0] == 18


async def test_a_stuck_forward_is_not_reported_as_a_gate_wait() -> None:
    """Rule 7: a hung device must show, gate or no gate."""
    async with standing_device(1) as (scheduler, runner):
        assert isinstance(runner, HandClockRunner)
        await scheduler.plans(two_sequences())
        await stands_in(runner, "forward", 1)
        pong = await scheduler.ping()
        assert pong.waiting == worker_pb2.Pong.WAITING_DEVICE
        assert pong.running_step_age_ns > 0
