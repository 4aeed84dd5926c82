"""Exact plans of the normal path: admission, chunks, joining, steady decode, predictable ends."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import (
    Admission,
    Admitted,
    Finished,
    Incarnation,
    LaneId,
    RequestKey,
    SamplingSpec,
    SettleMode,
    StepId,
    StepPlan,
)
from tests.scheduler.core.builders import Driver

COLUMNS = (
    "released_slots", "released_incarnations", "append_slots", "append_block_ids", "admissions", "joined_slots",
    "sit_out_slots", "left_slots", "row_slots", "row_starts", "row_counts", "row_samples",
)  # fmt: skip


def changes(plan: StepPlan) -> dict[str, tuple[object, ...]]:
    """The columns of a plan that are not empty."""
    return {name: getattr(plan, name) for name in COLUMNS if getattr(plan, name)}


def test_admission_carries_everything_a_replay_needs() -> None:
    """B7, protocol semantics 9: slot, incarnation, history, blocks and sampling in one delta."""
    driver = Driver.of()
    spec = SamplingSpec(temperature=0.5, seed=9, suppressed_token_ids=(2,))
    driver.add(1, (7, 8, 9, 10, 11), max_tokens=6, min_tokens=3, sampling=spec)
    plan = driver.must_plan()
    assert plan == StepPlan(
        step_id=StepId(1),
        committed_through=StepId(0),
        settle=SettleMode.RETAIN,
        admissions=(
            Admission(
                slot=0,  # type: ignore[arg-type]
                incarnation=Incarnation(1),
                token_ids=(7, 8, 9, 10, 11),
                num_prompt_tokens=5,
                num_settled_tokens=0,
                block_ids=(0, 1),  # type: ignore[arg-type]
                sampling=spec,
                min_tokens=3,
            ),
        ),
        row_slots=(0,),  # type: ignore[arg-type]
        row_starts=(0,),
        row_counts=(5,),
        row_samples=(True,),
        total_tokens=5,
        total_rows=1,
    )
    assert driver.outcome.admitted == (Admitted(RequestKey(1), LaneId(0), first_time=True),)
    assert driver.free_slots() == (1, 2, 3, 4, 5, 6, 7)
    assert driver.free_blocks() == tuple(range(2, 16))


def test_steady_decode_plan_says_nothing_about_its_rows() -> None:
    """A decode plan is O(changes): every column empty whatever the width; the first one carries the joins."""
    driver = Driver.of(block_size=8)
    for key in (1, 2, 3):
        driver.add(key, 2, max_tokens=20)
    assert changes(driver.must_plan())["row_counts"] == (2, 2, 2)
    first = driver.must_plan()
    assert changes(first) == {"joined_slots": (0, 1, 2)}
    for step in range(3, 8):
        driver.commit(10, 11, 12)
        plan = driver.must_plan()
        assert (plan.step_id, plan.committed_through, plan.total_tokens, plan.total_rows) == (step, step - 2, 3, 3)
        assert changes(plan) == {}, f"step {step}"
    assert driver.outputs(2) == [11] * 5


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_plan_is_refused_when_the_window_is_full(depth: int) -> None:
    """B3: at most D + 1 uncommitted steps; settle modes say who waits."""
    driver = Driver.of(overlap_depth=depth)
    driver.add(1)
    for _ in range(depth + 1):
        plan = driver.must_plan()
        assert plan.settle is (SettleMode.RETAIN if depth else SettleMode.COMPLETE_IN_PLACE)
    assert driver.plan() is None
    driver.commit(10)
    assert driver.must_plan().step_id == depth + 2


def test_admission_does_not_wait_for_the_window() -> None:
    """A request gets its slot while the window is full; the next plan announces it."""
    driver = Driver.of()
    driver.add(1)
    driver.must_plan()
    driver.must_plan()
    driver.add(2, 3)
    assert driver.plan() is None
    assert driver.outcome.admitted == (Admitted(RequestKey(2), LaneId(0), first_time=True),)
    driver.commit(10)
    plan = driver.must_plan()
    assert [(a.slot, a.incarnation, a.block_ids) for a in plan.admissions] == [(1, 2, (2,))]
    assert (plan.append_slots, plan.append_block_ids, plan.row_slots) == ((), (), (1,))


def test_chunks_across_steps_without_overlap() -> None:
    """M1, M3, D = 0: ten tokens at four a step are 4 + 4 + 2; only the last chunk samples."""
    driver = Driver.of(overlap_depth=0, max_num_batched_tokens=4)
    driver.add(1, 10)
    seen: list[object] = []
    for _ in range(3):
        plan = driver.must_plan()
        seen.append((len(plan.admissions), plan.row_starts, plan.row_counts, plan.row_samples, plan.total_tokens))
        outcome = driver.commit(*([50] if plan.row_samples == (True,) else []))
        assert (outcome.num_rows, outcome.num_tokens) == (1, plan.total_tokens)
    assert seen == [
        (1, (0,), (4,), (False,), 4),
        (0, (4,), (4,), (False,), 4),
        (0, (8,), (2,), (True,), 2),
    ]
    assert driver.outputs(1) == [50]
    assert driver.counters(1) == (11, 10, 10, 0)


def test_next_chunk_is_planned_while_the_first_is_in_flight() -> None:
    """M1, M2, A2, BL-13, D = 1: S moves at dispatch, P at commit, U only with the sampling chunk."""
    driver = Driver.of(max_num_batched_tokens=4)
    driver.add(1, 10)
    assert driver.must_plan().row_starts == (0,)
    assert driver.counters(1) == (10, 4, 0, 0)
    assert driver.must_plan().row_starts == (4,)
    assert driver.counters(1) == (10, 8, 0, 0)
    driver.commit()
    assert driver.counters(1) == (10, 8, 4, 0)
    last = driver.must_plan()
    assert (last.row_starts, last.row_counts, last.row_samples) == ((8,), (2,), (True,))
    assert driver.counters(1) == (10, 10, 4, 1)
    driver.commit()
    decode = driver.must_plan()
    assert changes(decode) == {"joined_slots": (0,)}
    assert driver.counters(1) == (10, 11, 8, 2)
    assert driver.commit(60).token_ids == [60]
    assert driver.counters(1) == (11, 11, 10, 1)


def test_decode_rows_come_before_chunks() -> None:
    """BL-13, M3: every decode row keeps its token; prompts share what is left of the budget, oldest first."""
    driver = Driver.of(max_num_batched_tokens=6)
    driver.add(1, 2, max_tokens=20)
    driver.add(2, 2, max_tokens=20)
    driver.must_plan()
    driver.add(3, 7)
    driver.add(4, 7)
    plan = driver.must_plan()
    assert (plan.joined_slots, plan.row_slots, plan.row_counts, plan.total_tokens) == ((0, 1), (2,), (4,), 6)
    driver.commit(10, 20)
    plan = driver.must_plan()
    assert (plan.row_slots, plan.row_starts, plan.row_counts) == ((2, 3), (4, 0), (3, 1))
    assert plan.row_samples == (True, False)
    assert [a.slot for a in plan.admissions] == [3]
    driver.commit(11, 21)
    plan = driver.must_plan()
    assert (plan.row_slots, plan.row_starts, plan.row_counts, plan.total_rows) == ((3,), (1,), (3,), 4)


def test_twenty_chunks_beside_eight_decodes() -> None:
    """BL-13: a long prompt in many chunks beside staggered decodes; the driver probes every counter."""
    driver = Driver.of(max_num_seqs=9, num_slots=18, max_num_batched_tokens=11, max_model_len=80, num_blocks=80)
    for key in range(1, 9):
        driver.add(key, 1 + key % 3, max_tokens=10 + key)
    driver.plan()
    driver.add(99, 60, max_tokens=2)
    chunks = 0
    while not driver.scheduler.is_idle:
        plan = driver.plan()
        if plan is not None:
            chunks += sum(not samples for samples in plan.row_samples)
        if plan is None or len(driver.books[LaneId(0)].steps) > 1:
            _, rows = driver.books[LaneId(0)].steps[0]
            driver.commit(*[7 for row in rows if row.samples])
    assert chunks >= 10
    assert driver.scheduler.totals.output_tokens == sum(10 + key for key in range(1, 9)) + 2


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_predictable_end_costs_no_row(depth: int) -> None:
    """D2, BL-19: max_tokens n is exactly n sampling rows, whatever the window; the slot leaves by itself."""
    for max_tokens in (1, 2, 3, 5):
        driver = Driver.of(overlap_depth=depth)
        driver.add(1, 3, max_tokens=max_tokens)
        rows = 0
        finished: list[Finished] = []
        while not driver.scheduler.is_idle:
            plan = driver.plan()
            if plan is not None:
                rows += plan.total_rows
                continue
            outcome = driver.commit(10 + len(finished))
            assert outcome.num_overrun_rows == 0
            finished += outcome.finished
        assert rows == max_tokens
        assert [(f.reason.value, f.num_output_tokens) for f in finished] == [("length", max_tokens)]


def test_left_and_released_are_carried_by_the_next_plan() -> None:
    """B6: at the last output the slot leaves the decode set; the release rides on the next plan with rows."""
    driver = Driver.of()
    driver.add(1, 2, max_tokens=2)
    driver.add(2, 2, max_tokens=9)
    driver.must_plan()
    assert driver.must_plan().joined_slots == (0, 1)  # the last row of request 1
    driver.commit(10, 20)
    plan = driver.must_plan()
    assert changes(plan) == {"left_slots": (0,)}
    assert plan.total_rows == 1
    assert [f.key for f in driver.commit(11, 21).finished] == [1]
    assert driver.free_slots() == (2, 3, 4, 5, 6, 7, 0)
    plan = driver.must_plan()
    assert (plan.released_slots, plan.released_incarnations) == ((0,), (1,))
    assert "left_slots" not in changes(plan)


def test_a_release_never_causes_a_plan_of_its_own() -> None:
    """B9: nothing to run, nothing sent; the release waits for the next plan with rows."""
    driver = Driver.of(overlap_depth=0)
    driver.add(1, 2, max_tokens=1)
    driver.must_plan()
    driver.commit(10)
    assert driver.plan() is None
    assert driver.scheduler.is_idle
    driver.add(2, 2)
    plan = driver.must_plan()
    assert (plan.released_slots, plan.released_incarnations) == ((0,), (1,))
    assert [(a.slot, a.incarnation, a.block_ids) for a in plan.admissions] == [(1, 2, (1,))]


def test_a_slot_may_be_released_and_given_again_in_one_plan() -> None:
    """Order inside a plan: releases come first, so a single slot serves request after request."""
    driver = Driver.of(overlap_depth=0, max_num_seqs=1, num_slots=1)
    driver.add(1, 2, max_tokens=1)
    driver.add(2, 2, max_tokens=1)
    driver.must_plan()
    driver.commit(10)
    plan = driver.must_plan()
    assert (plan.released_slots, plan.released_incarnations) == ((0,), (1,))
    assert [(a.slot, a.incarnation) for a in plan.admissions] == [(0, 2)]


def test_blocks_are_appended_one_step_ahead_of_their_tokens() -> None:
    """A6: the plan that feeds the first position of a block carries the block, before the token is known."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=8)
    driver.add(2, 3, max_tokens=8)
    driver.must_plan()
    appended: list[object] = []
    for step in range(6):
        plan = driver.must_plan()
        appended.append((plan.append_slots, plan.append_block_ids))
        driver.commit(10 + step, 20 + step)
    assert appended == [((0,), (2,)), ((1,), (3,)), ((), ()), ((), ()), ((0,), (4,)), ((1,), (5,))]


def test_settle_prompts_in_place() -> None:
    """With the switch on, only steps with prompt chunks settle in place; decode steps are retained."""
    driver = Driver.of(policy={"settle_prompts_in_place": True})
    driver.add(1)
    assert driver.must_plan().settle is SettleMode.COMPLETE_IN_PLACE
    assert driver.must_plan().settle is SettleMode.RETAIN
    driver.commit(10)
    driver.add(2)
    assert driver.must_plan().settle is SettleMode.COMPLETE_IN_PLACE


def test_totals_and_views() -> None:
    """A7, A8: what the metrics see; idle only when nothing waits, runs or is in flight."""
    driver = Driver.of(max_num_seqs=1)
    scheduler = driver.scheduler
    assert scheduler.is_idle
    driver.add(1, 5, max_tokens=20)
    driver.add(2, 5)
    assert (scheduler.num_running, len(scheduler.waiting), scheduler.is_idle) == (0, 2, False)
    driver.must_plan()
    assert (scheduler.num_running, len(scheduler.waiting)) == (1, 1)
    driver.must_plan()
    driver.commit(9)
    assert (scheduler.totals.prefill_tokens, scheduler.totals.output_tokens) == (5, 1)
    scheduler.abort(RequestKey(1))
    scheduler.abort(RequestKey(2))
    assert (scheduler.num_running, scheduler.is_idle) == (0, False)
    assert driver.commit(9).num_overrun_rows == 1
    assert scheduler.is_idle
    assert scheduler.lanes[LaneId(0)].num_overrun_rows == 1
