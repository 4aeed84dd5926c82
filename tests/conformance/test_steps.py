"""Steps over the wire: order, at-most-once, rows, holes (rules B1 - B10, C1 - C5)."""

from __future__ import annotations

from typing import Any

import pytest

from stepahead.v1 import worker_pb2
from tests.conformance.double import Scheduler, connect, serve
from tests.worker.fakes import FakeRunner, continuation
from tests.worker.plans import IN_PLACE, RETAIN, admission, plan, start

Reason = worker_pb2.StepRejected


def tokens_of(boundary: worker_pb2.StepBoundary, slot: int) -> list[int]:
    """Tokens a slot sampled in a step."""
    completion = boundary.completion
    counts = list(completion.token_counts) or [1] * len(completion.slots)
    tokens = iter(completion.token_ids)
    by_slot = {
        row: [next(tokens) for _ in range(count)] for row, count in zip(completion.slots, counts, strict=True)
    }
    return by_slot.get(slot, [])


@pytest.mark.parametrize("settle", [RETAIN, IN_PLACE])
@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_tokens_do_not_depend_on_the_overlap(depth: int, settle: int) -> None:
    """D4, B1, B2: every plan is answered once, in order, and D changes no token."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=depth)
        sent = 0
        tokens: list[int] = []
        for completed in range(9):
            while sent < 9 and sent <= completed + depth:
                sent += 1
                steps: dict[str, Any] = {"committed": completed, "settle": settle}
                if sent == 4:  # a block before it is needed
                    steps |= {"append_slots": [0], "append_counts": [1], "append_block_ids": [9]}
                await scheduler.plans(
                    start(1, 0, [1, 2, 3], **steps) if sent == 1 else plan(sent, decode=1, **steps)
                )
            boundary = await scheduler.boundary()
            assert boundary.completed_step_id == completed + 1
            tokens += tokens_of(boundary, 0)
        assert tokens == continuation([1, 2, 3], 9)


async def test_chunks_then_decode_beside_other_rows() -> None:
    """C3, C4: a middle chunk samples nothing; rows that come and go change nobody's token."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=0)
        await scheduler.plans(start(1, 4, [5, 6]))
        first = tokens_of(await scheduler.boundary(), 4)
        prompt = [9, 8, 7, 6, 5]
        await scheduler.plans(plan(2, rows=[(1, 0, 3, False)], decode=1, admissions=[admission(1, prompt)]))
        boundary = await scheduler.boundary()
        assert list(boundary.completion.slots) == [1, 4]
        assert list(boundary.completion.incarnations) == [101, 104]
        assert list(boundary.completion.token_counts) == [0, 1]
        second = tokens_of(boundary, 4)
        await scheduler.plans(plan(3, rows=[(1, 3, 2, True)], decode=1, joined_slots=[1]))
        boundary = await scheduler.boundary()
        assert not boundary.completion.token_counts
        third, other = tokens_of(boundary, 4), tokens_of(boundary, 1)
        await scheduler.plans(plan(4, decode=1, released_slots=[4], released_incarnations=[104]))
        other += tokens_of(await scheduler.boundary(), 1)
        assert first + second + third == continuation([5, 6], 3)
        assert other == continuation(prompt, 2)


async def test_a_resumed_sequence_reads_its_history_never_an_old_cell() -> None:
    """C5, B6: the slot's cell is void once its incarnation has gone."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=0)
        await scheduler.plans(start(1, 0, [1, 2]))
        output = tokens_of(await scheduler.boundary(), 0)
        await scheduler.plans(
            plan(
                2,
                rows=[(0, 0, 3, True)],
                released_slots=[0],
                released_incarnations=[100],
                admissions=[admission(0, [1, 2, *output], incarnation=7, num_prompt_tokens=2)],
                joined_slots=[0],
            )
        )
        boundary = await scheduler.boundary()
        assert list(boundary.completion.incarnations) == [7]
        output += tokens_of(boundary, 0)
        await scheduler.plans(plan(3, decode=1))
        output += tokens_of(await scheduler.boundary(), 0)
        assert output == continuation([1, 2], 3)


async def test_a_row_without_a_sample_before_it_is_a_hole() -> None:
    """C1: reading a cell that was not written is detected, writes nothing, and the position can be fed again."""
    runner = FakeRunner()
    async with serve(lambda: runner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=1)
        await scheduler.plans(start(1, 0, [1, 2]))
        token = tokens_of(await scheduler.boundary(), 0)
        runner.non_finite_slots.add(0)
        await scheduler.plans(plan(2, decode=1))
        failed = await scheduler.boundary()
        await scheduler.plans(plan(3, decode=1))
        hole = await scheduler.boundary()
        for boundary, code in (
            (failed, worker_pb2.RowError.CODE_NON_FINITE),
            (hole, worker_pb2.RowError.CODE_POSITION_MISMATCH),
        ):
            assert list(boundary.completion.token_counts) == [0]
            assert not boundary.completion.token_ids
            assert [(e.slot, e.incarnation, e.code) for e in boundary.completion.row_errors] == [(0, 100, code)]
        runner.non_finite_slots.clear()
        await scheduler.plans(plan(4, rows=[(0, 2, 1, True)]), plan(5, decode=1, committed=3))
        again = tokens_of(await scheduler.boundary(), 0) + tokens_of(await scheduler.boundary(), 0)
        assert token + again == continuation([1, 2], 3)
        assert [position for _, position, _ in runner.fed] == [0, 1, 2, 2, 3]


async def test_a_failed_row_leaves_its_neighbours_alone() -> None:
    """O3, J10."""
    runner = FakeRunner()
    runner.non_finite_slots.add(1)
    async with serve(lambda: runner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        messages = [admission(slot, [slot + 1, 2]) for slot in range(3)]
        await scheduler.plans(plan(1, rows=[(slot, 0, 2, True) for slot in range(3)], admissions=messages))
        boundary = await scheduler.boundary()
        assert list(boundary.completion.token_counts) == [1, 0, 1]
        assert list(boundary.completion.token_ids) == [continuation([1, 2], 1)[0], continuation([3, 2], 1)[0]]


async def test_a_repeated_plan_is_not_executed_again() -> None:
    """B1."""
    runner = FakeRunner()
    async with serve(lambda: runner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(start(1, 0, [1, 2]), start(1, 0, [1, 2]))
        rejected, boundary = None, None
        for _ in range(2):  # the boundary and the rejection race
            message = await scheduler.read_any()
            rejected = message.rejected if message.HasField("rejected") else rejected
            boundary = message.boundary if message.HasField("boundary") else boundary
        assert boundary is not None
        assert rejected is not None
        assert (rejected.step_id, rejected.reason) == (1, Reason.REASON_ALREADY_EXECUTED)
        assert [batch.step_id for batch in runner.batches] == [1]


async def test_plans_that_do_not_continue_are_rejected_and_change_nothing() -> None:
    """B1, B3, B7."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=1)
        bad = [
            (start(2, 0, [1, 2], committed=0), Reason.REASON_NOT_NEXT, "step_id: is 2, the next one is 1"),
            (start(0, 0, [1, 2], previous_step_id=0, committed=0), Reason.REASON_NOT_NEXT, "step_id: is 0"),
            (start(1, 0, [1, 2], previous_step_id=4), Reason.REASON_NOT_NEXT, "previous_step_id: is 4"),
            (start(1, 0, [1, 2], committed=1), Reason.REASON_OUT_OF_WINDOW, "committed_through: is 1"),
            (start(1, 9, [1, 2]), Reason.REASON_INVALID, "admissions[0].slot: slot 9"),
        ]
        for message, reason, text in bad:
            await scheduler.plans(message)
            rejected = await scheduler.rejected()
            assert (rejected.step_id, rejected.reason) == (message.step_id, reason)
            assert rejected.violations[0].startswith(text)
        await scheduler.plans(start(1, 0, [1, 2]))
        assert tokens_of(await scheduler.boundary(), 0) == continuation([1, 2], 1)


async def test_the_window_is_refused_not_queued() -> None:
    """B3: with k the oldest uncommitted step, k + D + 1 is refused."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=1)
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, decode=1, committed=0))
        await scheduler.boundary()
        await scheduler.boundary()
        await scheduler.plans(plan(3, decode=1, committed=0))
        assert (await scheduler.rejected()).reason == Reason.REASON_OUT_OF_WINDOW
        await scheduler.plans(plan(3, decode=1, committed=2))
        assert (await scheduler.boundary()).completed_step_id == 3


async def test_an_empty_plan_flushes_and_draining_twice_returns_nothing_more() -> None:
    """B9."""
    runner = FakeRunner()
    async with serve(lambda: runner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, committed=0, sit_out_slots=[0]))
        assert (await scheduler.boundary()).completed_step_id == 1
        empty = await scheduler.boundary()
        assert (empty.completed_step_id, empty.running_step_id, empty.gap_ns) == (2, 0, 0)
        assert not empty.completion.slots
        assert empty.HasField("completion")
        for nonce in (5, 6):
            await scheduler.send(drain=worker_pb2.DrainSteps(nonce=nonce))
            drained = (await scheduler.read("drained")).drained
            assert (drained.nonce, drained.last_completed_step_id) == (nonce, 2)
        assert len(runner.batches) == 1


async def test_results_survive_the_runners_next_step() -> None:
    """B10: the fake runner overwrites its one result buffer in every step."""
    async with serve(FakeRunner) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=2)
        await scheduler.plans(start(1, 0, [1, 2]), plan(2, decode=1, committed=0), plan(3, decode=1, committed=0))
        tokens = [tokens_of(await scheduler.boundary(), 0)[0] for _ in range(3)]
        assert tokens == continuation([1, 2], 3)


async def test_everything_of_the_device_runs_on_one_thread() -> None:
    runner = FakeRunner()
    async with serve(lambda: runner) as server, connect(server) as stub:
        for epoch in (1, 2):
            scheduler = Scheduler(stub)
            await scheduler.open(scheduler_epoch=epoch)
            await scheduler.plans(start(1, 0, [1, 2]))
            await scheduler.boundary()
            await scheduler.send(close=worker_pb2.CloseSession(reason="test"))
            await scheduler.end()
        assert len(runner.threads) == 1
