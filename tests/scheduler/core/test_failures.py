"""Steps and rows that fail, rows that come back empty, results that do not belong: the core stays exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest

from stepahead.scheduler.core import (
    Finished,
    FinishReason,
    RequestKey,
    RowFault,
    StepId,
    StepMismatch,
    StepResult,
)
from tests.scheduler.core.builders import LANE, Driver

# ------------------------------------------------------------------------------------------------ empty rows


def test_an_empty_row_is_fed_again_and_the_hole_behind_it_too() -> None:
    """A2, A3, protocol semantics 3: S and U fall for both rows; one explicit row feeds the position again."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=9)
    driver.add(2, 4, max_tokens=9)
    driver.must_plan()
    driver.commit(10, 20)
    driver.must_plan()
    driver.must_plan()
    outcome = driver.commit(21, empty=[0])
    assert (outcome.keys, outcome.token_ids, outcome.finished) == ([2], [21], [])
    # Its second row in flight is a hole: nothing is fed until that has come back.
    plan = driver.must_plan()
    assert (plan.left_slots, plan.row_slots, plan.total_rows) == ((0,), (), 1)
    outcome = driver.commit(22, faults={0: RowFault.POSITION_MISMATCH})
    assert (outcome.finished, outcome.num_overrun_rows) == ([], 0)
    assert driver.counters(1) == (5, 4, 4, 0)
    plan = driver.must_plan()
    assert (plan.row_slots, plan.row_starts, plan.row_counts, plan.row_samples) == ((0,), (4,), (1,), (True,))
    assert plan.admissions == ()
    assert driver.commit(23).token_ids == [23]
    plan = driver.must_plan()
    assert plan.joined_slots == (0,)
    # Explicit rows come first in the columns.
    assert driver.commit(11, 24).keys == [1, 2]


def test_an_empty_sampling_chunk_is_fed_again_from_its_last_position() -> None:
    """M1: the chunk's positions but the last are settled."""
    driver = Driver.of(overlap_depth=0, max_num_batched_tokens=8)
    driver.add(1, 6)
    driver.must_plan()
    driver.commit(empty=[0])
    assert driver.counters(1) == (6, 5, 5, 0)
    plan = driver.must_plan()
    assert (plan.row_starts, plan.row_counts, plan.joined_slots, plan.left_slots) == ((5,), (1,), (), ())
    assert driver.commit(10).token_ids == [10]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_empty_last_output_is_fed_again(depth: int) -> None:
    """D2: the last possible output failed to come; the request returns from the rows that were done."""
    driver = Driver.of(overlap_depth=depth)
    driver.add(1, 4, max_tokens=2)
    driver.must_plan()
    driver.commit(10)
    driver.must_plan()
    driver.commit(empty=[0])
    plan = driver.must_plan()
    assert (plan.left_slots, plan.row_slots, plan.row_starts) == ((0,), (0,), (4,))
    assert [f.num_output_tokens for f in driver.commit(11).finished] == [2]
    assert driver.scheduler.is_idle


def test_repeated_empty_rows_make_no_progress_and_lose_nothing() -> None:
    """A4's only exception: the same position again and again, until a token comes."""
    driver = Driver.of()
    driver.add(1, 4)
    driver.must_plan()
    driver.commit(empty=[0])
    for _ in range(5):
        plan = driver.must_plan()
        assert (plan.row_starts, plan.row_counts) == ((3,), (1,))
        driver.commit(empty=[0])
    driver.must_plan()
    assert driver.commit(10).token_ids == [10]


def test_empty_rows_of_requests_that_are_gone() -> None:
    """F2, G1: an aborted one counts as overrun, a preempted one simply has nothing to deliver."""
    driver = Driver.of(num_blocks=3, max_model_len=12, max_num_seqs=2)
    driver.add(1, 3, max_tokens=9)
    driver.add(2, 3, max_tokens=9)
    driver.must_plan()
    driver.must_plan()
    driver.commit(10, 20)
    driver.must_plan()
    assert [event.key for event in driver.outcome.preempted] == [2]
    assert driver.scheduler.abort(RequestKey(1)) is not None
    outcome = driver.commit(empty=[0, 1])
    assert (outcome.keys, outcome.finished, outcome.num_overrun_rows) == ([], [], 1)
    assert driver.outputs(2) == [20]
    outcome = driver.commit(empty=[0])
    assert outcome.num_overrun_rows == 1
    plan = driver.must_plan()
    assert [a.token_ids for a in plan.admissions] == [(100, 101, 102, 20)]


def test_overrun_in_a_step_with_chunks() -> None:
    """D3: an ended request's row beside a chunk: its token is dropped, the neighbour's kept."""
    driver = Driver.of(max_num_batched_tokens=6)
    driver.add(1, 2, max_tokens=9)
    driver.must_plan()
    driver.commit(10)
    driver.add(2, 10)
    driver.must_plan()
    assert driver.scheduler.abort(RequestKey(1)) is not None
    outcome = driver.commit(11)
    assert (outcome.keys, outcome.num_overrun_rows, outcome.num_rows) == ([], 1, 2)


def test_a_returning_last_output_goes_before_a_newcomer() -> None:
    """G6, O8: the older request needs one more row; the newcomer in its place must not run to its end first."""
    driver = Driver.of(max_num_seqs=1, num_slots=2)
    driver.add(1, 4, max_tokens=1)
    driver.add(2, 4, max_tokens=20)
    driver.must_plan()
    driver.plan()  # admits request 2: request 1 needs no more rows, it seems
    driver.commit(empty=[0])
    for _ in range(8):
        driver.plan()
        _, rows = driver.books[LANE].steps[0]
        if [f.key for f in driver.commit(*[10] * len(rows)).finished] == [1]:
            return
    raise AssertionError("request 1 waits for the whole of request 2")


def test_rows_that_return_from_finishing_respect_the_row_limit() -> None:
    """M3: two last outputs fail after two newcomers took their places; later a sitting-out row lets both in."""
    driver = Driver.of(max_num_seqs=2, num_slots=4, num_blocks=6, max_model_len=20, max_num_batched_tokens=8)
    driver.add(1, 1, max_tokens=3)
    driver.add(2, 1, max_tokens=3)
    driver.must_plan()
    driver.must_plan()
    driver.commit(10, 20)
    driver.must_plan()  # the last rows of requests 1 and 2
    driver.add(3, 4, max_tokens=12)
    driver.add(4, 5, max_tokens=4)
    assert driver.plan() is None
    assert len(driver.outcome.admitted) == 2
    driver.fail()
    driver.fail()
    while not driver.scheduler.is_idle:
        plan = driver.plan()
        assert plan is None or plan.total_rows <= 2
        if plan is None or len(driver.books[LANE].steps) > 1:
            _, rows = driver.books[LANE].steps[0]
            driver.commit(*[30 for row in rows if row.samples])


# ------------------------------------------------------------------------------------------------ row faults


@pytest.mark.parametrize("fault", [RowFault.NON_FINITE, RowFault.NOTHING_ALLOWED])
def test_a_row_fault_ends_that_request_only(fault: RowFault) -> None:
    """J10, BL-32, O3: one ERROR with the fault; the neighbour's token is delivered; later rows are overrun."""
    driver = Driver.of()
    driver.add(1, 4)
    driver.add(2, 4)
    driver.must_plan()
    driver.must_plan()
    outcome = driver.commit(20, faults={0: fault})
    assert (outcome.keys, outcome.token_ids) == ([2], [20])
    assert outcome.finished == [Finished(RequestKey(1), FinishReason.ERROR, 0, fault=fault)]
    outcome = driver.commit(21, faults={0: RowFault.POSITION_MISMATCH})
    assert (outcome.token_ids, outcome.finished, outcome.num_overrun_rows) == ([21], [], 1)
    plan = driver.must_plan()
    assert plan.released_slots == (0,)


# ------------------------------------------------------------------------------------------------ failed steps


def test_a_failed_step_is_rolled_back_and_fed_again() -> None:
    """A3, O3, protocol semantics 6: deltas stand, rows do not; the plan already sent fails too."""
    driver = Driver.of(max_num_batched_tokens=8)
    driver.add(1, 4)
    driver.add(2, 8)
    driver.must_plan()
    assert driver.counters(2) == (8, 4, 0, 0)
    driver.must_plan()
    driver.fail()
    assert driver.plan() is None, "the rows in flight are lost too: nothing is fed before they have come back"
    driver.fail()
    assert driver.counters(1) == (4, 0, 0, 0)
    assert driver.counters(2) == (8, 0, 0, 0)
    plan = driver.must_plan()
    assert plan.admissions == ()
    assert plan.row_starts == (0, 0)
    assert plan.row_counts[0] + plan.row_counts[1] == 8
    assert plan.committed_through == plan.step_id - 1


def test_a_failed_decode_step_leaves_the_decode_set_and_returns() -> None:
    """B7: the slot leaves and joins again by deltas; nothing was delivered twice."""
    driver = Driver.of(overlap_depth=0)
    driver.add(1, 4)
    driver.must_plan()
    driver.commit(10)
    driver.must_plan()
    driver.fail()
    plan = driver.must_plan()
    assert (plan.left_slots, plan.row_slots, plan.row_starts, plan.row_counts) == ((0,), (0,), (4,), (1,))
    assert driver.commit(11).token_ids == [11]
    assert driver.must_plan().joined_slots == (0,)


def test_a_failed_step_is_the_fence_of_what_it_named() -> None:
    """E1, E4: an aborted request's slot and blocks come back when the failed step is reported."""
    driver = Driver.of()
    driver.add(1, 4)
    driver.must_plan()
    assert driver.scheduler.abort(RequestKey(1)) is not None
    driver.fail()
    assert driver.scheduler.is_idle
    assert len(driver.free_blocks()) == 16


def test_a_failure_is_not_handed_on_for_ever() -> None:
    """O8, O3, protocol semantics 6: one failed step, two requests in alternate steps, a busy step loop.

    A plan whose committed_through is below a failed step fails too. Planned behind a doomed step, every plan is.
    """
    driver = Driver.of(max_num_seqs=2, max_num_batched_tokens=2)
    driver.add(1, 2, max_tokens=1)
    driver.add(2, 2, max_tokens=1)
    newest_failed = 0
    for _ in range(20):
        while (plan := driver.plan()) is not None:
            if plan.step_id == 1 or plan.committed_through < newest_failed:
                newest_failed = plan.step_id
        oldest, rows = driver.books[LANE].steps[0]
        if oldest.committed_through < newest_failed and oldest.step_id <= newest_failed:
            driver.fail()
        elif driver.commit(*[10] * len(rows)).finished:
            return
    raise AssertionError("every step failed because the one before it did")


@pytest.mark.parametrize("step_id", [0, 2, 3])
def test_only_the_oldest_step_in_flight_may_fail(step_id: int) -> None:
    """B2: a failure out of order is a contradiction."""
    driver = Driver.of()
    driver.add(1, 4)
    driver.must_plan()
    driver.must_plan()
    with pytest.raises(StepMismatch, match=f"step {step_id} failed"):
        driver.scheduler.fail_step(LANE, 1, StepId(step_id))
    assert len(driver.scheduler.lanes[LANE].in_flight) == 2


def test_a_failure_with_nothing_in_flight() -> None:
    """B2."""
    driver = Driver.of()
    with pytest.raises(StepMismatch):
        driver.scheduler.fail_step(LANE, 1, StepId(1))


# ------------------------------------------------------------------------------------------------ mismatches


def two_rows() -> Driver:
    """Request 1 feeds a middle chunk (no sample), request 2 its whole prompt (one sample), both in step 1."""
    driver = Driver.of(max_num_batched_tokens=6, overlap_depth=1)
    driver.add(2, 2)
    driver.add(1, 9)
    plan = driver.must_plan()
    assert plan.row_samples == (True, False)
    return driver


def snapshot(driver: Driver) -> object:
    """Everything a refused result must leave alone."""
    lane = driver.scheduler.lanes[LANE]
    return copy.deepcopy(
        (
            [driver.counters(key) for key in (1, 2)],
            [driver.outputs(key) for key in (1, 2)],
            [step.step_id for step in lane.in_flight],
            lane.committed_through,
            (lane.blocks.free_ids(), lane.slots.free_ids()),
            driver.scheduler.totals,
        )
    )


MISMATCHES: dict[str, Callable[[StepResult], StepResult]] = {
    "older step": lambda r: replace(r, step_id=StepId(0)),
    "newer step": lambda r: replace(r, step_id=StepId(2)),
    "rows missing": lambda r: replace(r, incarnations=r.incarnations[:1]),
    "rows swapped": lambda r: replace(r, incarnations=r.incarnations[::-1]),
    "another incarnation": lambda r: replace(r, incarnations=[r.incarnations[0], r.incarnations[1] + 9]),
    "too many tokens": lambda r: replace(r, token_ids=[1, 2]),
    "too few tokens": lambda r: replace(r, token_ids=[]),
    "tokens for rows that do not sample": lambda r: replace(r, token_counts=None, token_ids=[1, 2]),
}
LATE_MISMATCHES: dict[str, Callable[[StepResult], StepResult]] = {
    "a middle chunk has a token": lambda r: replace(r, token_counts=[0, 1]),
    "two tokens in one row": lambda r: replace(r, token_counts=[2, 0], token_ids=[1, 2]),
    "a count too few": lambda r: replace(r, token_counts=[1]),
    "a count too many": lambda r: replace(r, token_counts=[1, 0, 0]),
    "a negative count": lambda r: replace(r, token_counts=[2, -1], token_ids=[1]),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_result_that_does_not_belong_changes_nothing(name: str) -> None:
    """B2, B4: wrong id, rows or token count raises StepMismatch; the true result is still accepted."""
    driver = two_rows()
    before = snapshot(driver)
    good = driver.result(50)
    with pytest.raises(StepMismatch, match="result of step"):
        driver.scheduler.commit(LANE, MISMATCHES[name](good))
    assert snapshot(driver) == before
    assert driver.commit(50).keys == [2]


@pytest.mark.parametrize("name", LATE_MISMATCHES)
def test_counts_that_contradict_the_rows_change_nothing(name: str) -> None:
    """B4: commit_step promises that nothing changed when it raises StepMismatch."""
    driver = two_rows()
    before = snapshot(driver)
    with pytest.raises(StepMismatch):
        driver.scheduler.commit(LANE, LATE_MISMATCHES[name](driver.result(50)))
    assert snapshot(driver) == before


def test_a_decode_step_needs_one_token_per_row() -> None:
    """B4: without counts every row has a token."""
    driver = Driver.of(overlap_depth=0)
    driver.add(1, 4)
    driver.add(2, 4)
    driver.must_plan()
    driver.commit(10, 20)
    driver.must_plan()
    before = snapshot(driver)
    good = driver.result(11, 21)
    for tokens in ([], [11], [11, 21, 31]):
        with pytest.raises(StepMismatch, match=f"has {len(tokens)} tokens"):
            driver.scheduler.commit(LANE, replace(good, token_ids=tokens))
        assert snapshot(driver) == before
    assert driver.commit(11, 21).token_ids == [11, 21]


def test_a_middle_chunk_with_a_token_is_refused() -> None:
    """M1, C4: a row that does not sample has no token."""
    driver = two_rows()
    with pytest.raises(StepMismatch, match="sample"):
        driver.scheduler.commit(LANE, LATE_MISMATCHES["a middle chunk has a token"](driver.result(50)))


def test_a_result_with_nothing_in_flight() -> None:
    """B2: a repeated result of the last step is a contradiction."""
    driver = Driver.of(overlap_depth=0)
    driver.add(1, 4)
    driver.must_plan()
    result = driver.result(10)
    driver.scheduler.commit(LANE, result)
    with pytest.raises(StepMismatch, match="oldest in flight is none"):
        driver.scheduler.commit(LANE, result)
    assert driver.outputs(1) == [10]
