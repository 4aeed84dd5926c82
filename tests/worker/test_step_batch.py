"""The arrays of a step."""

import numpy as np
import pytest

from stepahead.worker.runner import LAST_SAMPLE
from tests.worker.plans import TableDriver, admission, plan, start


def test_a_prompt_chunk_is_fed_from_the_history() -> None:
    batch, rows = TableDriver().run(
        plan(1, rows=[(1, 0, 5, False)], admissions=[admission(1, [10, 11, 12, 13, 14, 15])])
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.query_start_loc.tolist() == [0, 5]
    assert batch.seq_lens.tolist() == [5]
    assert batch.block_tables.tolist() == [[2, 3]]
    assert batch.slot_mapping.tolist() == [8, 9, 10, 11, 12]
    assert batch.sample_rows.tolist() == []
    assert len(batch.sampling) == 0
    assert rows.slots == [1]
    assert rows.incarnations == [101]


def test_steady_decode_feeds_each_member_its_last_sample() -> None:
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    driver.run(plan(2, rows=[(1, 0, 3, True)], decode=1, admissions=[admission(1, [4, 5, 6])], joined_slots=[1]))
    batch, rows = driver.run(plan(3, decode=2))
    assert batch.slots.tolist() == [0, 1]
    assert batch.token_ids.tolist() == [LAST_SAMPLE, LAST_SAMPLE]
    assert batch.positions.tolist() == [3, 3]
    assert batch.slot_mapping.tolist() == [3, 11]
    assert batch.seq_lens.tolist() == [4, 4]
    assert batch.block_tables.tolist() == [[0], [2]]
    assert batch.sample_rows.tolist() == [0, 1]
    assert batch.sampling.output_index.tolist() == [2, 1]
    assert rows.last_positions.tolist() == [3, 3]


def test_rows_keep_plan_order_explicit_first_then_members_by_joining() -> None:
    """C3: order is stated, never guessed."""
    driver = TableDriver()
    driver.run(start(1, 2, [1]))
    driver.run(start(2, 0, [2], total_rows=2, total_tokens=2))
    batch, rows = driver.run(plan(3, rows=[(1, 0, 2, False)], decode=2, admissions=[admission(1, [7, 8, 9])]))
    assert rows.slots == [1, 2, 0]
    assert batch.query_start_loc.tolist() == [0, 2, 3, 4]
    assert batch.sample_rows.tolist() == [1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 1]


def test_a_member_named_explicitly_runs_once_and_as_stated() -> None:
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    batch, _ = driver.run(plan(2, rows=[(0, 2, 1, False)]))
    assert batch.slots.tolist() == [0]
    assert batch.token_ids.tolist() == [LAST_SAMPLE]
    assert batch.sample_rows.tolist() == []


def test_a_member_that_sits_out_keeps_its_position() -> None:
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    driver.run(start(2, 1, [3, 4], sit_out_slots=[0]))
    batch, _ = driver.run(plan(3, decode=2))
    assert batch.positions.tolist() == [2, 2]


def test_a_member_inside_its_history_is_fed_from_it() -> None:
    driver = TableDriver()
    batch, _ = driver.run(plan(1, decode=1, admissions=[admission(0, [9])], joined_slots=[0]))
    assert batch.token_ids.tolist() == [9]


def test_settled_positions_are_not_fed() -> None:
    driver = TableDriver()
    batch, _ = driver.run(
        plan(1, rows=[(0, 4, 2, True)], admissions=[admission(0, [1, 2, 3, 4, 5, 6], num_settled_tokens=4)])
    )
    assert batch.token_ids.tolist() == [5, 6]
    assert batch.slot_mapping.tolist() == [4, 5]


def test_output_index_counts_from_the_prompt_after_a_resume() -> None:
    """Rule 9 of the precise semantics: a draw depends on the output index, so a replay must know the prompt."""
    driver = TableDriver()
    batch, _ = driver.run(
        plan(1, rows=[(0, 0, 4, True)], admissions=[admission(0, [1, 2, 3, 4], num_prompt_tokens=2)])
    )
    assert batch.sampling.output_index.tolist() == [2]


def test_sampling_columns_follow_their_slots() -> None:
    driver = TableDriver()
    first = admission(4, [1])
    first.sampling.temperature, first.sampling.top_k, first.sampling.seed = 0.5, 7, 2**64 - 1
    first.sampling.min_p, first.sampling.choice_index, first.sampling.top_p = 0.25, 3, 0.5
    driver.run(plan(1, decode=1, admissions=[first], joined_slots=[4]))
    batch, _ = driver.run(start(2, 0, [2], total_rows=2, total_tokens=2))
    columns = batch.sampling
    assert columns.temperature.tolist() == [0, 0.5]
    assert columns.top_k.tolist() == [0, 7]
    assert columns.seed.tolist() == [0, 2**64 - 1]
    assert columns.min_p.tolist() == [0, 0.25]
    assert columns.top_p.tolist() == [1, 0.5]
    assert columns.choice_index.tolist() == [0, 3]
    assert columns.seed.dtype == np.uint64


def test_suppression_ends_at_min_tokens() -> None:
    """J6: the index at which the ids become legal is exact."""
    driver = TableDriver()
    message = admission(0, [1, 2])
    message.sampling.suppressed_token_ids.extend([0, 3])
    message.sampling.min_tokens = 2
    suppressed = []
    batch, _ = driver.run(plan(1, rows=[(0, 0, 2, True)], admissions=[message], joined_slots=[0]))
    suppressed.append(batch.sampling.suppressed)
    for step_id in (2, 3):
        batch, _ = driver.run(plan(step_id, decode=1))
        suppressed.append(batch.sampling.suppressed)
    assert [[ids.tolist() for ids in row if ids is not None] for row in suppressed] == [[[0, 3]], [[0, 3]], []]


def test_constrained_sampling_rows_are_listed() -> None:
    driver = TableDriver()
    driver.run(plan(1, decode=1, admissions=[admission(0, [1])], joined_slots=[0]))
    rows = [(1, 0, 1, False), (2, 0, 1, True)]
    messages = [admission(1, [4, 5], constrained=True), admission(2, [6], constrained=True)]
    _, identity = driver.run(plan(2, rows=rows, decode=1, admissions=messages))
    assert [identity.slots[identity.sample_rows[i]] for i in identity.constrained] == [2]


@pytest.mark.parametrize("first_steps", [1, 2])
def test_arrays_handed_out_are_never_written_again(first_steps: int) -> None:
    """B10: the device may still read step N while the host builds N + 1."""
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    for step_id in range(2, 2 + first_steps):
        batch, _ = driver.run(plan(step_id, decode=1))
    before = {
        name: getattr(batch, name).copy() for name in ("positions", "block_tables", "slot_mapping", "token_ids")
    }
    next_id = 2 + first_steps
    driver.run(plan(next_id, decode=1, append_slots=[0], append_counts=[1], append_block_ids=[15]))
    driver.run(plan(next_id + 1, released_slots=[0], released_incarnations=[100], rows=[(5, 0, 1, True)],
                    admissions=[admission(5, [3])]))  # fmt: skip
    for name, values in before.items():
        assert np.array_equal(getattr(batch, name), values), name


def test_copies_and_zeroed_blocks_travel_with_the_step() -> None:
    batch, _ = TableDriver().run(
        plan(
            1,
            rows=[(0, 0, 1, True)],
            admissions=[admission(0, [1])],
            copy_src_block_ids=[3, 4],
            copy_dst_block_ids=[5, 6],
            zeroed_block_ids=[7],
        )
    )
    assert batch.copies == ((3, 5), (4, 6))
    assert batch.zeroed_blocks == (7,)
