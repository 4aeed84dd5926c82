"""Abort in every phase: one terminal, the token in flight suppressed, resources back at the fence (F1-F5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepahead.scheduler.core import Finished, FinishReason, RequestKey
from tests.scheduler.core.builders import EOS, LANE, Driver

KEY = RequestKey(1)


def aborted(driver: Driver, num_output_tokens: int) -> None:
    """Aborts request 1 and checks the one terminal, and that a second abort finds nothing (F3)."""
    assert driver.scheduler.abort(KEY) == Finished(KEY, FinishReason.CANCELLED, num_output_tokens)
    assert driver.scheduler.abort(KEY) is None
    assert KEY not in driver.scheduler.sequences


def everything_is_free(driver: Driver) -> bool:
    lane = driver.scheduler.lanes[LANE]
    return (lane.blocks.num_free, lane.slots.num_free) == (lane.blocks.num_total, lane.slots.num_total)


def test_abort_in_the_queue() -> None:
    """F1, F4: the place in the queue is free at once, the others keep their order."""
    driver = Driver.of(max_num_seqs=2)
    for key in (1, 2, 3):
        driver.add(key)
    aborted(driver, 0)
    plan = driver.must_plan()
    assert [a.key for a in driver.outcome.admitted] == [2, 3]
    assert [a.incarnation for a in plan.admissions] == [1, 2]


def test_abort_admitted_but_not_announced() -> None:
    """F1, B6: the worker never heard of it: everything is free at once and no release is sent."""
    driver = Driver.of(max_num_batched_tokens=4)
    driver.add(9, 4, max_tokens=20)
    driver.must_plan()
    driver.must_plan()
    driver.add(1)
    assert driver.plan() is None
    assert driver.free_slots() == (2, 3, 4, 5, 6, 7)
    aborted(driver, 0)
    assert driver.free_slots() == (2, 3, 4, 5, 6, 7, 1)
    driver.commit(10)
    plan = driver.must_plan()
    assert (plan.released_slots, plan.admissions, plan.row_slots) == ((), (), ())


def test_abort_before_the_first_chunk_fits_the_budget() -> None:
    """F1, M3: admitted, but the budget went to an older prompt; nothing of it was ever sent."""
    driver = Driver.of(max_num_batched_tokens=4, overlap_depth=0)
    driver.add(9, 8)
    driver.add(1)
    plan = driver.must_plan()
    assert [a.slot for a in plan.admissions] == [0]
    aborted(driver, 0)
    driver.commit()
    plan = driver.must_plan()
    assert (plan.released_slots, plan.admissions, plan.row_starts) == ((), (), (4,))


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_abort_with_a_chunk_in_flight(committed: int) -> None:
    """F1, F2, M4: first, middle or last chunk in flight; blocks of all chunks come back once, at the fence."""
    driver = Driver.of(max_num_batched_tokens=4)
    driver.add(1, 12)
    for _ in range(committed):
        driver.must_plan()
        driver.commit()
    plan = driver.must_plan()
    assert plan.row_samples == (committed == 2,)
    aborted(driver, 0)
    lane = driver.scheduler.lanes[LANE]
    assert (lane.blocks.num_quarantined, lane.slots.num_quarantined) == (3, 1)
    assert driver.plan() is None
    outcome = driver.commit(*([33] if plan.row_samples == (True,) else []))
    assert (outcome.keys, outcome.finished, outcome.num_overrun_rows) == ([], [], 1)
    assert everything_is_free(driver)
    assert driver.scheduler.is_idle


def test_abort_between_two_chunks_in_flight() -> None:
    """M4, E1: two chunks in flight; the fence is the newer one."""
    driver = Driver.of(max_num_batched_tokens=4)
    driver.add(1, 12)
    driver.must_plan()
    driver.must_plan()
    aborted(driver, 0)
    driver.commit()
    assert not everything_is_free(driver)
    driver.commit()
    assert everything_is_free(driver)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_in_decode_suppresses_every_token_in_flight(depth: int) -> None:
    """F1, F2, D1, E1: at most D + 1 rows in flight are overrun; slot and blocks follow at the newest fence."""
    driver = Driver.of(overlap_depth=depth)
    driver.add(1, 4, max_tokens=20)
    driver.must_plan()
    driver.commit(10)
    for _ in range(depth + 1):
        driver.must_plan()
    aborted(driver, 1)
    for remaining in reversed(range(depth + 1)):
        assert not everything_is_free(driver)
        outcome = driver.commit(11)
        assert (outcome.token_ids, outcome.num_overrun_rows) == ([], 1)
        assert everything_is_free(driver) == (remaining == 0)


def test_abort_wins_over_an_end_in_flight() -> None:
    """F2, BL-08, BL-12: max_tokens 1 and EOS in flight; the reason is the abort's, nothing is freed twice."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=1, stop_token_ids=frozenset({EOS}))
    driver.must_plan()
    aborted(driver, 0)
    outcome = driver.commit(EOS)
    assert (outcome.token_ids, outcome.finished, outcome.num_overrun_rows) == ([], [], 1)
    assert everything_is_free(driver)


def test_abort_after_the_terminal_is_ignored() -> None:
    """F1, F3: one terminal only, whether the request ended a moment ago or never existed."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=1)
    driver.must_plan()
    assert len(driver.commit(10).finished) == 1
    assert driver.scheduler.abort(KEY) is None
    assert driver.scheduler.abort(RequestKey(404)) is None


def test_abort_in_the_same_batch_of_messages_as_the_last_token() -> None:
    """BL-08, E5: the end commits with a row still in flight, then the abort arrives: freed once."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=20, stop_token_ids=frozenset({EOS}))
    driver.must_plan()
    driver.must_plan()
    assert len(driver.commit(EOS).finished) == 1
    assert driver.scheduler.abort(KEY) is None
    driver.commit(12)
    assert everything_is_free(driver)


def test_blocks_of_an_aborted_request_wait_for_the_fence() -> None:
    """E1, E3, BL-01, BL-07: the newcomer gets neither slot nor blocks before the overrun row completed."""
    driver = Driver.of(num_blocks=2, max_num_seqs=1, num_slots=1, max_model_len=8)
    driver.add(1, 4, max_tokens=3)
    driver.must_plan()
    driver.must_plan()
    driver.add(2, 5, max_tokens=2)
    aborted(driver, 0)
    assert driver.plan() is None
    driver.commit(10)
    assert driver.plan() is None
    assert driver.outcome.admitted == ()
    driver.commit(11)
    plan = driver.must_plan()
    assert (plan.released_slots, plan.released_incarnations) == ((0,), (1,))
    assert [(a.slot, a.incarnation, a.block_ids) for a in plan.admissions] == [(0, 2, (0, 1))]


def test_abort_of_a_joined_slot_that_was_never_announced_as_such() -> None:
    """B6, B7: the join was pending; only the release is sent."""
    driver = Driver.of(overlap_depth=2)
    driver.add(1, 4, max_tokens=20)
    driver.add(2, 4, max_tokens=20)
    driver.must_plan()
    aborted(driver, 0)
    plan = driver.must_plan()
    assert (plan.released_slots, plan.joined_slots, plan.left_slots) == ((0,), (1,), ())


def test_abort_of_a_slot_that_was_about_to_leave() -> None:
    """B6, B7: the last output is in flight and the leave is pending; only the release is sent."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=2)
    driver.add(2, 4, max_tokens=20)
    driver.must_plan()
    driver.must_plan()
    aborted(driver, 0)
    assert driver.commit(10, 20).token_ids == [20]
    plan = driver.must_plan()
    assert (plan.released_slots, plan.left_slots, plan.total_rows) == ((0,), (), 1)


def test_aborting_one_request_leaves_the_others_alone() -> None:
    """F5: the same schedule with and without an abort gives the neighbours the same tokens and order."""

    def run(abort_at: int | None) -> list[tuple[int, int]]:
        driver = Driver.of(num_blocks=32)
        for key in (1, 2, 3):
            driver.add(key, 4, max_tokens=6)
        seen: list[tuple[int, int]] = []
        for turn in range(30):
            if turn == abort_at:
                driver.scheduler.abort(KEY)
            if driver.plan() is not None:
                continue
            if not driver.books[LANE].steps:
                break
            plan, rows = driver.books[LANE].steps[0]
            outcome = driver.commit(*[10 * row.incarnation + plan.step_id for row in rows])
            seen += [pair for pair in zip(outcome.keys, outcome.token_ids, strict=True) if pair[0] != KEY]
        return seen

    undisturbed = run(None)
    assert len(undisturbed) == 12
    for abort_at in range(1, 10):  # from 1: everybody has an incarnation, from which the token derives
        assert run(abort_at) == undisturbed


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_the_caller_names_the_reason(reason: FinishReason) -> None:
    """D8: the shell ends requests for its own reasons through the same door."""
    driver = Driver.of()
    driver.add(1)
    finish: Callable[..., Finished | None] = driver.scheduler.abort
    assert finish(KEY, reason) == Finished(KEY, reason, 0)
