"""The slot table: what each delta does to the columns."""

import numpy as np

from stepahead.worker.slot_table import NO_HOLE
from tests.worker.plans import TableDriver, admission, plan, start


def test_admission_fills_the_columns_of_its_slot() -> None:
    driver = TableDriver()
    driver.run(start(1, 2, [3, 4, 5]))
    table = driver.table
    assert table.incarnation[2] == 102
    assert (table.history_len[2], table.num_prompt[2], table.next_position[2]) == (3, 3, 3)
    assert table.groups[0].block_tables[2].tolist() == [4, 5, 0, 0]
    assert (table.groups[0].num_blocks[2], table.capacity[2]) == (2, 8)
    assert table.members.tolist() == [2]


def test_capacity_is_bounded_by_max_model_len() -> None:
    driver = TableDriver()
    driver.run(plan(1, rows=[(0, 0, 1, True)], admissions=[admission(0, [1], block_ids=[0, 1, 2, 3])]))
    assert driver.table.capacity[0] == 16


def test_appended_blocks_follow_those_of_the_admission() -> None:
    driver = TableDriver()
    driver.run(start(1, 1, [3, 4]))
    driver.run(plan(2, decode=1, append_slots=[1], append_counts=[2], append_block_ids=[9, 7]))
    assert driver.table.groups[0].block_tables[1].tolist() == [2, 3, 9, 7]
    assert driver.table.groups[0].num_blocks[1] == 4


def test_a_readmitted_slot_keeps_nothing_of_its_predecessor() -> None:
    """C5, B6."""
    driver = TableDriver()
    first = admission(0, [1, 2], constrained=True, block_ids=[0, 1, 2])
    first.sampling.suppressed_token_ids.append(5)
    first.sampling.min_tokens = 4
    driver.run(plan(1, rows=[(0, 0, 2, True)], admissions=[first], joined_slots=[0]))
    driver.table.note_unsampled(slot=0, incarnation=100, step_id=1, position=1)
    second = admission(0, [7], incarnation=300, block_ids=[8])
    batch, _ = driver.run(
        plan(2, rows=[(0, 0, 1, True)], released_slots=[0], released_incarnations=[100], admissions=[second])
    )
    table = driver.table
    assert batch.invalidated_slots.tolist() == [0]
    assert table.groups[0].block_tables[0].tolist() == [8, 0, 0, 0]
    assert table.suppressed[0] is None
    assert not table.constrained[0]
    assert table.hole_position[0] == NO_HOLE
    assert len(table.members) == 0


def test_invalidations_of_a_plan_without_rows_reach_the_next_step() -> None:
    """B6: the cell of a released slot is void before anything reads it."""
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    driver.run(plan(2, rows=[(3, 0, 1, True)], admissions=[admission(3, [4])], sit_out_slots=[0]))
    driver.apply(plan(3, released_slots=[0], released_incarnations=[100]))
    batch, _ = driver.run(plan(4, rows=[(3, 1, 1, True)]))
    assert batch.invalidated_slots.tolist() == [0]
    batch, _ = driver.run(plan(5, rows=[(3, 2, 1, True)]))
    assert batch.invalidated_slots.tolist() == []


def test_a_hole_is_noted_once_and_only_for_the_living_incarnation() -> None:
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    table = driver.table
    table.note_unsampled(slot=0, incarnation=99, step_id=1, position=1)
    assert table.hole_position[0] == NO_HOLE
    table.note_unsampled(slot=0, incarnation=100, step_id=1, position=1)
    table.note_unsampled(slot=0, incarnation=100, step_id=2, position=2)
    assert table.hole_position[0] == 1


def test_results_older_than_a_refeed_make_no_new_hole() -> None:
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    driver.run(plan(2, decode=1))
    driver.table.note_unsampled(slot=0, incarnation=100, step_id=1, position=1)
    driver.run(plan(3, rows=[(0, 1, 1, True)]))
    driver.table.note_unsampled(slot=0, incarnation=100, step_id=2, position=1)
    assert driver.table.hole_position[0] == NO_HOLE
    assert np.array_equal(driver.table.next_position[:1], [2])
