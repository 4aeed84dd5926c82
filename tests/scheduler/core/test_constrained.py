"""Constrained rows: which rows of a step wait for a mask, and what becomes of a row that got none."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import GateRow, Incarnation, RequestKey, RowFault, SlotId, StepId
from tests.scheduler.core.builders import EOS, LANE, Driver


def rows_of(driver: Driver) -> tuple[int, list[GateRow]]:
    gate = driver.scheduler.gate_rows(LANE)
    assert gate is not None
    return gate


def test_a_lane_without_steps_wants_no_gate() -> None:
    assert Driver.of().scheduler.gate_rows(LANE) is None


def test_only_constrained_rows_that_sample_wait() -> None:
    """M1, I3: a middle chunk samples nothing; the gate names slot, incarnation and the position fed last."""
    driver = Driver.of(max_num_batched_tokens=8)
    driver.add(1, 12, constrained=True)
    driver.add(2, 4)
    driver.must_plan()
    driver.must_plan()
    assert rows_of(driver) == (1, [])
    driver.commit()
    expected = GateRow(key=RequestKey(1), slot=SlotId(0), incarnation=Incarnation(1), position=11, wanted=True)
    assert rows_of(driver) == (2, [expected])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_gate_of_a_step_is_asked_for_when_all_before_it_is_committed(depth: int) -> None:
    """I1: decode rows, too, with the position each fed when the step was made, whatever was planned since."""
    driver = Driver.of(overlap_depth=depth)
    driver.add(1, 4, constrained=True)
    for _ in range(depth + 1):
        driver.must_plan()
    for committed in range(4):
        step_id, (row,) = rows_of(driver)
        assert (step_id, row.position, row.wanted) == (committed + 1, 3 + committed, True)
        driver.commit(10 + committed)
        driver.must_plan()


def test_the_row_of_an_ended_request_is_not_wanted() -> None:
    """D1, design rule 4: its step waits for the gate all the same, which says SKIP; the others go on."""
    driver = Driver.of()
    driver.add(1, 4, constrained=True, stop_token_ids=frozenset({EOS}))
    driver.add(2, 4, constrained=True)
    driver.must_plan()
    driver.must_plan()
    driver.commit(EOS, 20)
    _, rows = rows_of(driver)
    assert [(row.key, row.wanted) for row in rows] == [(1, False), (2, True)]
    outcome = driver.commit(21, empty=[0])
    assert (outcome.keys, outcome.num_overrun_rows) == ([2], 1)


@pytest.mark.parametrize("faults", [{}, {0: RowFault.GATE_MISSING}], ids=["skipped", "gate missing"])
def test_a_row_without_a_mask_is_fed_again(faults: dict[int, RowFault]) -> None:
    """I2: nothing is sampled, nothing ends; the row behind it is a hole, unwanted; then the position runs again."""
    driver = Driver.of()
    driver.add(1, 4, constrained=True)
    driver.must_plan()
    driver.must_plan()
    outcome = driver.commit(faults=faults, empty=[] if faults else [0])
    assert (outcome.keys, outcome.finished) == ([], [])
    _, (hole,) = rows_of(driver)
    assert (hole.position, hole.wanted) == (4, False)
    driver.commit(empty=[0])
    plan = driver.must_plan()
    assert (plan.row_starts, plan.row_samples) == ((3,), (True,))
    step_id, (again,) = rows_of(driver)
    assert (step_id, again.position, again.wanted) == (StepId(3), 3, True)
    assert driver.commit(10).token_ids == [10]


def test_the_admission_says_that_the_slot_is_constrained() -> None:
    """Also the one after a lane loss."""
    driver = Driver.of()
    driver.add(1, 4, constrained=True)
    assert driver.must_plan().admissions[0].constrained
    driver.lose()
    driver.reopen()
    assert driver.must_plan().admissions[0].constrained
