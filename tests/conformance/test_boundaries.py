"""The previous-step boundary, with a device that moves only when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stepahead.v1 import worker_pb2
from tests.conformance.double import Scheduler, connect, serve
from tests.worker.fakes import FakeRunner, HandClockRunner
from tests.worker.plans import IN_PLACE, RETAIN, admission, plan, start

Pong = worker_pb2.Pong


@asynccontextmanager
async def standing_device(depth: int, **fields: Any) -> AsyncIterator[tuple[Scheduler, HandClockRunner]]:
    """An open session on a device that stands still."""
    runner = HandClockRunner()

    def let_go() -> None:
        runner.allow_forward(100)
        runner.allow_sample(100)

    async with serve(lambda: runner, release=let_go, **fields) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=depth)
        yield scheduler, runner


async def stands_in(runner: HandClockRunner, call: str, step_id: int) -> None:
    await asyncio.to_thread(runner.wait_until, call, step_id)


async def test_a_boundary_names_the_step_that_was_running_when_its_step_ended() -> None:
    """Rule 1: sampled on the device stream, not when the message is built."""
    async with standing_device(1) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, decode=1, committed=0))
        runner.allow_forward()
        await stands_in(runner, "sample", 1)
        assert (await scheduler.ping()).waiting == Pong.WAITING_DEVICE  # plan 2 has been taken
        runner.allow_sample()
        boundary = await scheduler.boundary()
        assert (boundary.completed_step_id, boundary.running_step_id, boundary.queued_steps) == (1, 2, 1)
        await stands_in(runner, "forward", 2)
        runner.allow_forward()
        runner.allow_sample()
        boundary = await scheduler.boundary()
        assert (boundary.completed_step_id, boundary.running_step_id, boundary.queued_steps) == (2, 0, 0)


async def test_a_boundary_leaves_while_the_next_step_runs() -> None:
    """The round: settle N - 1 as soon as forward N is launched; nothing of N is waited for."""
    async with standing_device(1) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, decode=1, committed=0))
        runner.allow_forward()
        runner.allow_sample()
        assert (await scheduler.boundary()).completed_step_id == 1
        await stands_in(runner, "forward", 2)
        pong = await scheduler.ping()
        assert (pong.waiting, pong.last_completed_step_id) == (Pong.WAITING_DEVICE, 1)
        assert pong.running_step_age_ns > 0


async def test_a_retained_result_is_delivered_without_another_command() -> None:
    """D9, rule 1: RETAIN never holds a finished result."""
    async with standing_device(1) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2]))
        await stands_in(runner, "forward", 1)
        runner.allow_forward()
        runner.allow_sample()
        boundary = await scheduler.boundary()
        assert (boundary.completed_step_id, boundary.running_step_id) == (1, 0)


async def test_complete_in_place_launches_nothing_behind_the_step() -> None:
    async with standing_device(1) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2], settle=IN_PLACE), plan(2, decode=1, committed=0))
        assert (await scheduler.ping()).waiting == Pong.WAITING_DEVICE
        runner.allow_forward()
        runner.allow_sample()
        boundary = await scheduler.boundary()
        assert (boundary.completed_step_id, boundary.running_step_id, boundary.queued_steps) == (1, 0, 0)
        await stands_in(runner, "forward", 2)


async def test_at_depth_two_the_third_plan_is_taken_and_waits() -> None:
    async with standing_device(2) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, decode=1, committed=0), plan(3, decode=1, committed=0))
        assert (await scheduler.ping()).last_completed_step_id == 0
        runner.allow_forward(3)
        runner.allow_sample(3)
        steps = [await scheduler.boundary() for _ in range(3)]
        assert [step.completed_step_id for step in steps] == [1, 2, 3]
        assert steps[0].running_step_id == 2
        assert steps[2].running_step_id == 0


async def test_a_commit_of_a_step_that_has_not_completed_is_invalid() -> None:
    async with standing_device(0) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, decode=1, committed=1))
        rejected = await scheduler.rejected()
        assert rejected.reason == worker_pb2.StepRejected.REASON_INVALID
        assert rejected.violations[0].startswith("committed_through: step 1 has not completed")
        runner.allow_forward()
        runner.allow_sample()
        assert (await scheduler.boundary()).completed_step_id == 1


async def test_an_empty_plan_is_never_running_and_follows_its_predecessor() -> None:
    async with standing_device(1) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, committed=0, sit_out_slots=[0]))
        await stands_in(runner, "forward", 1)
        await scheduler.ping()
        runner.allow_forward()
        runner.allow_sample()
        first, second = await scheduler.boundary(), await scheduler.boundary()
        assert (first.completed_step_id, first.running_step_id, first.queued_steps) == (1, 0, 0)
        assert (second.completed_step_id, second.running_step_id) == (2, 0)


async def test_drained_comes_behind_every_boundary() -> None:
    """B9."""
    async with standing_device(1) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, decode=1, committed=0))
        await scheduler.send(drain=worker_pb2.DrainSteps(nonce=7))
        assert (await scheduler.ping()).nonce == 1
        runner.allow_forward(2)
        runner.allow_sample(2)
        assert [(await scheduler.boundary()).completed_step_id for _ in range(2)] == [1, 2]
        drained = (await scheduler.read("drained")).drained
        assert (drained.nonce, drained.last_completed_step_id) == (7, 2)


async def test_timings_and_gaps_are_of_the_device() -> None:
    async with standing_device(1) as (scheduler, runner):
        await scheduler.plans(start(1, 0, [1, 2]))
        runner.allow_forward()
        runner.allow_sample()
        first = await scheduler.boundary()
        runner.allow_forward()
        runner.allow_sample()
        await scheduler.plans(plan(2, decode=1))
        second = await scheduler.boundary()
        assert first.gap_ns == 0  # the first of its epoch
        assert second.gap_ns > 0  # idle until the plan came
        for boundary in (first, second):
            timings = boundary.completion.timings
            assert min(timings.launch_ns, timings.forward_ns, timings.sample_wait_ns, timings.sample_ns) > 0
            assert boundary.send_delay_ns > 0
            assert boundary.worker_epoch == 1


async def test_held_events_wait_for_the_next_command() -> None:
    """The worker of `lab boundary`: what is processed depends on commands, never on timing."""
    runner = FakeRunner()
    async with serve(lambda: runner, hold_events=True) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        prompt = start(1, 0, [1, 2], settle=IN_PLACE)
        await scheduler.plans(prompt)
        assert (await scheduler.boundary()).completed_step_id == 1
        await scheduler.plans(plan(2, decode=1))
        assert (await scheduler.ping()).last_completed_step_id == 1
        await scheduler.plans(plan(3, decode=1, committed=1))
        boundary = await scheduler.boundary()
        assert (boundary.completed_step_id, boundary.running_step_id) == (2, 3)
        assert (await scheduler.ping()).last_completed_step_id == 2
        await scheduler.plans(plan(4, committed=2, sit_out_slots=[0]))
        assert [(await scheduler.boundary()).completed_step_id for _ in range(2)] == [3, 4]


async def test_a_drain_lets_held_events_go() -> None:
    async with serve(FakeRunner, hold_events=True) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(start(1, 0, [1, 2]))
        await scheduler.send(drain=worker_pb2.DrainSteps(nonce=1))
        assert (await scheduler.boundary()).completed_step_id == 1
        assert (await scheduler.read("drained")).drained.last_completed_step_id == 1


@pytest.mark.parametrize("settle", [IN_PLACE, RETAIN])
async def test_single_steps_end_when_they_are_flushed(settle: Any) -> None:
    """The worker of `lab batch`: a step stands still until DrainSteps, whoever waits for it."""
    async with serve(FakeRunner, single_step=True) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=0)
        plans = start(1, 0, [1, 2], settle=settle), plan(2, decode=1, committed=1, settle=settle)
        for step, plan_of_step in enumerate(plans, 1):
            await scheduler.plans(plan_of_step)
            assert (await scheduler.ping()).last_completed_step_id == step - 1
            await scheduler.send(drain=worker_pb2.DrainSteps(nonce=step))
            assert (await scheduler.boundary()).completed_step_id == step
            assert (await scheduler.read("drained")).drained.nonce == step


async def test_a_session_starts_over_although_old_steps_still_run() -> None:
    """O2: results of the old epoch reach nobody, and the runner forgets its cells in between."""
    runner = HandClockRunner()

    def let_go() -> None:
        runner.allow_forward(100)
        runner.allow_sample(100)

    async with serve(lambda: runner, release=let_go) as server, connect(server) as stub:
        old = Scheduler(stub)
        await old.open()
        messages = [admission(0, [1, 2], constrained=True)]
        await old.plans(plan(1, rows=[(0, 0, 2, True)], admissions=messages, gate_wait_ns=10**12))
        await stands_in(runner, "forward", 1)
        new = Scheduler(stub)
        opened = await new.open(scheduler_epoch=2)
        assert (opened.worker_epoch, opened.last_accepted_step_id, opened.last_completed_step_id) == (2, 0, 0)
        await new.plans(start(1, 0, [3, 4]))
        assert (await new.ping()).waiting == Pong.WAITING_DEVICE
        runner.allow_forward(2)
        runner.allow_sample(1)
        boundary = await new.boundary()
        assert (boundary.worker_epoch, boundary.completed_step_id, boundary.running_step_id) == (2, 1, 0)
        assert boundary.gap_ns == 0
        assert runner.num_resets == 2
