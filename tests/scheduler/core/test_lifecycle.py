"""The transition table, values that stay values, and the invariant checker itself."""

# pyright: reportPrivateUsage=false
# The checker is tested by breaking private state, which no public call can do.

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from stepahead.scheduler.core import (
    Admitted,
    Finished,
    FinishReason,
    LaneId,
    PlanOutcome,
    Preempted,
    RequestKey,
    RequestStatus,
    SlotId,
)
from stepahead.scheduler.core.block_pool import FencedPool
from stepahead.scheduler.core.invariants import InvariantViolation, check_invariants
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.request import TRANSITIONS, LifecycleEvent
from stepahead.scheduler.core.sequence import Sequence
from tests.scheduler.core.builders import LANE, Driver, make_request

LEGAL = {
    (RequestStatus.WAITING, LifecycleEvent.ADMIT): RequestStatus.RUNNING,
    (RequestStatus.WAITING, LifecycleEvent.FINISH): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, LifecycleEvent.PREEMPT): RequestStatus.PREEMPTED,
    (RequestStatus.RUNNING, LifecycleEvent.FINISH): RequestStatus.FINISHED,
    (RequestStatus.PREEMPTED, LifecycleEvent.ADMIT): RequestStatus.RUNNING,
    (RequestStatus.PREEMPTED, LifecycleEvent.FINISH): RequestStatus.FINISHED,
}


@pytest.mark.parametrize("event", LifecycleEvent)
@pytest.mark.parametrize("status", RequestStatus)
def test_every_status_meets_every_event(status: RequestStatus, event: LifecycleEvent) -> None:
    """D8, F3: the table is complete; an illegal event raises and changes nothing."""
    sequence = Sequence(make_request(1), 0, 12)
    sequence.status = status
    if (status, event) in LEGAL:
        sequence.apply(event)
        assert sequence.status is LEGAL[status, event]
        return
    with pytest.raises(AssertionError, match="illegal"):
        sequence.apply(event)
    assert sequence.status is status


def test_the_table_lists_every_status() -> None:
    """The product above is the whole table."""
    assert set(TRANSITIONS) == set(RequestStatus)
    assert sum(len(row) for row in TRANSITIONS.values()) == len(LEGAL)


def test_finished_is_final() -> None:
    """D8: nothing leads out of FINISHED."""
    assert TRANSITIONS[RequestStatus.FINISHED] == {}


def test_plans_and_events_are_values() -> None:
    """B10: what was handed out never changes afterwards, whatever happens to the scheduler."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=9)
    plan = driver.must_plan()
    plan_before, admitted_before = dataclasses.asdict(plan), driver.outcome.admitted
    outcome = driver.result(10)
    committed = driver.commit(10)
    committed_before = (list(committed.keys), list(committed.token_ids), list(committed.finished))
    driver.must_plan()
    driver.commit(11)
    driver.lose()
    assert dataclasses.asdict(plan) == plan_before
    assert admitted_before == (Admitted(RequestKey(1), LANE, first_time=True),)
    assert (committed.keys, committed.token_ids, committed.finished) == committed_before
    assert outcome.token_ids == [10]
    for value in (plan, plan.admissions[0], driver.outcome, make_request(1)):
        field_name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field_name, None)


def test_a_result_is_not_kept_by_reference() -> None:
    """B10: the buffer of a result may be overwritten as soon as commit returns."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=9)
    driver.add(2, 4, max_tokens=9)
    driver.must_plan()
    result = driver.result(10, 20)
    outcome = driver.scheduler.commit(LANE, result)
    result.token_ids[:] = [-1, -1]
    result.incarnations.clear()
    assert (outcome.token_ids, driver.outputs(1), driver.outputs(2)) == ([10, 20], [10], [20])


def test_events_compare_by_value() -> None:
    """B10: equal facts are equal values."""
    assert Finished(RequestKey(1), FinishReason.STOP, 3) == Finished(RequestKey(1), FinishReason.STOP, 3)
    assert Preempted(RequestKey(1)) != Preempted(RequestKey(2))
    assert PlanOutcome(None) == PlanOutcome(None, (), ())
    assert Admitted(RequestKey(1), LaneId(0), first_time=True) != Admitted(
        RequestKey(1), LaneId(0), first_time=False
    )


# ------------------------------------------------------------------------------------------------ the pool


def test_a_pool_gives_all_or_nothing_and_first_freed_first() -> None:
    """E4, E12: three places, one sum; the order of release is the order of reuse."""
    pool = FencedPool(SlotId(i) for i in range(4))
    assert pool.take(5) is None
    assert pool.take(3) == [0, 1, 2]
    pool.quarantine(2)
    assert (pool.num_free, pool.num_owned, pool.num_quarantined) == (1, 1, 2)
    pool.release([SlotId(1), SlotId(0)])
    assert pool.free_ids() == (3, 1, 0)
    assert (pool.num_free, pool.num_owned, pool.num_quarantined) == (3, 1, 0)


def test_a_pool_refuses_to_free_twice() -> None:
    """E5, BL-08: quarantine and release are bounded by what is owned and quarantined."""
    pool = FencedPool(SlotId(i) for i in range(2))
    pool.take(1)
    with pytest.raises(AssertionError, match="more than is owned"):
        pool.quarantine(2)
    with pytest.raises(AssertionError, match="more than was quarantined"):
        pool.release([SlotId(0)])


def test_a_stay_retires_once() -> None:
    """E5, BL-08."""
    driver = Driver.of()
    driver.add(1)
    driver.must_plan()
    lane = driver.scheduler.lanes[LANE]
    stay = driver.sequence(1).stay
    assert stay is not None
    lane.retire(stay)
    with pytest.raises(AssertionError, match="retired twice"):
        lane.retire(stay)


# ------------------------------------------------------------------------------------------------ the checker


def _own_counter(lane: Lane) -> None:
    lane.blocks.num_owned += 1


def _quarantine_counter(lane: Lane) -> None:
    lane.slots.num_quarantined += 1


def _block_in_two_places(lane: Lane) -> None:
    lane.blocks._free[0] = next(iter(lane.decoding)).block_ids[0]


def _settled_too_far(lane: Lane) -> None:
    next(iter(lane.decoding)).num_settled += 1


def _negative(lane: Lane) -> None:
    next(iter(lane.decoding)).num_placeholders = -1


def _placeholder_too_many(lane: Lane) -> None:
    next(iter(lane.decoding)).num_placeholders += 1


def _in_two_lists(lane: Lane) -> None:
    lane.prefilling.append(next(iter(lane.decoding)))


def _past_the_table(lane: Lane) -> None:
    next(iter(lane.decoding)).block_size = 1


def _past_the_limit(lane: Lane) -> None:
    next(iter(lane.decoding)).sequence.max_total_tokens = 1


def _gap_in_steps(lane: Lane) -> None:
    lane.in_flight[0].step_id += 1  # type: ignore[assignment]


def _fence_in_the_future(lane: Lane) -> None:
    next(iter(lane.decoding)).last_step = lane.next_step_id


def _too_many_steps(lane: Lane) -> None:
    lane.in_flight.extend([lane.in_flight[0]] * 2)


def _too_many_tokens(lane: Lane) -> None:
    lane.in_flight[0].num_tokens = 17


def _too_many_rows(lane: Lane) -> None:
    lane.in_flight[0].incarnations *= 5


def _history_without_a_row(lane: Lane) -> None:
    next(iter(lane.decoding)).sequence.history.append(5)


def _late_for_its_end(lane: Lane) -> None:
    lane.ends.clear()


def _late_for_its_block(lane: Lane) -> None:
    next(iter(lane.decoding)).border_tick += 1


def _early_for_its_block(lane: Lane) -> None:
    lane.crossing.append(next(iter(lane.decoding)))


def _forgotten(lane: Lane) -> None:
    lane.decoding.clear()


@pytest.mark.parametrize(
    ("breakage", "rule"),
    [
        (_own_counter, "E4"),
        (_quarantine_counter, "E4"),
        (_block_in_two_places, "E4"),
        (_in_two_lists, "A8|E4"),
        (_settled_too_far, "A2"),
        (_negative, "A2"),
        (_placeholder_too_many, "A2"),
        (_past_the_table, "A6"),
        (_past_the_limit, "D2"),
        (_gap_in_steps, "B1"),
        (_fence_in_the_future, "E1"),
        (_too_many_steps, "B3"),
        (_too_many_tokens, "M3"),
        (_too_many_rows, "M3"),
        (_history_without_a_row, "A2"),
        (_late_for_its_end, "D2"),
        (_late_for_its_block, "A6"),
        (_early_for_its_block, "A6"),
        (_forgotten, "A8"),
    ],
)
def test_the_checker_sees_broken_books(breakage: Callable[[Lane], None], rule: str) -> None:
    """A checker that cannot fail checks nothing."""
    driver = Driver.of()
    driver.add(1, 4, max_tokens=9)
    driver.must_plan()
    driver.must_plan()
    driver.commit(10)
    check_invariants(driver.scheduler)
    breakage(driver.scheduler.lanes[LANE])
    with pytest.raises(InvariantViolation, match=f"^({rule}): "):
        check_invariants(driver.scheduler)


def test_the_checker_sees_a_broken_queue() -> None:
    """F4, G6, A8, F1: foreign status, lost order, unknown sequence, twice in the queue."""
    driver = Driver.of()
    for key in (1, 2):
        driver.add(key)
    driver.must_plan()
    driver.lose()
    (waiting,) = driver.scheduler.waiting._lines.values()
    waiting._preempted.reverse()
    with pytest.raises(InvariantViolation, match=r"^G6"):
        check_invariants(driver.scheduler)
    waiting._preempted.reverse()
    waiting._preempted.append(waiting._preempted[0])
    with pytest.raises(InvariantViolation, match=r"^F1"):
        check_invariants(driver.scheduler)
    waiting._preempted.pop()
    driver.sequence(1).status = RequestStatus.RUNNING
    with pytest.raises(InvariantViolation, match=r"^F4"):
        check_invariants(driver.scheduler)
    driver.sequence(1).status = RequestStatus.PREEMPTED
    del driver.scheduler.sequences[RequestKey(1)]
    with pytest.raises(InvariantViolation, match=r"^A8"):
        check_invariants(driver.scheduler)


def test_the_checker_sees_what_is_held_while_idle() -> None:
    """E4, E6: a stay that nobody knows any more still holds a slot and blocks."""
    driver = Driver.of()
    driver.add(1)
    driver.must_plan()
    driver.commit(10)
    driver.scheduler.sequences.clear()
    lane = driver.scheduler.lanes[LANE]
    lane.decoding.clear()
    with pytest.raises(InvariantViolation, match=r"^E4"):
        check_invariants(driver.scheduler)
