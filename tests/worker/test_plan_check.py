"""Plans that must be refused, whole, with the field named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stepahead.v1 import worker_pb2
from stepahead.worker.errors import PlanInvalid
from tests.worker.plans import TableDriver, admission, plan, sampling, start


def running_pair() -> TableDriver:
    """Slots 0 and 1 decode at position 2; steps 1 and 2 are done."""
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    driver.run(start(2, 1, [3, 4], sit_out_slots=[0]))
    return driver


def refuse(driver: TableDriver, message: worker_pb2.StepPlan) -> list[str]:
    """The violations of a plan that must change nothing (B7)."""
    before, members = driver.snapshot(), driver.table.members
    with pytest.raises(PlanInvalid) as caught:
        driver.run(message)
    assert driver.table.members is members
    assert driver.snapshot() == before
    return caught.value.violations


NEW = {"rows": [(2, 0, 1, True)], "decode": 2}

BAD_PLANS: list[tuple[str, dict[str, Any]]] = [
    ("released_incarnations", {"released_slots": [0]}),
    ("released_slots[0]: slot 6 is not in 0 .. 5", {"released_slots": [6], "released_incarnations": [1]}),
    ("released_slots[0]: slot 3 is free", {"released_slots": [3], "released_incarnations": [1]}),
    ("released_slots[1]: slot 0 is free", {"released_slots": [0, 0], "released_incarnations": [100, 100]}),
    ("released_incarnations[0]: slot 0 holds 100, not 7", {"released_slots": [0], "released_incarnations": [7]}),
    ("append_counts: has 0 entries", {"append_slots": [0]}),
    ("append_block_ids: has 1 entries", {"append_slots": [0], "append_counts": [2], "append_block_ids": [1]}),
    ("append_slots[0]: slot 3 is free", {"append_slots": [3], "append_counts": [1], "append_block_ids": [1]}),
    ("append_block_ids[0]: block 16", {"append_slots": [0], "append_counts": [1], "append_block_ids": [16]}),
    ("append_counts[0]: must be", {"append_slots": [0], "append_counts": [0]}),
    (
        "append_counts[0]: slot 0 would hold 5",
        {"append_slots": [0], "append_counts": [3], "append_block_ids": [1, 2, 3]},
    ),
    (
        "append_slots[0]: slot 0 is free",
        {
            "released_slots": [0],
            "released_incarnations": [100],
            "append_slots": [0],
            "append_counts": [1],
            "append_block_ids": [9],
        },
    ),
    ("copy_dst_block_ids: has 0 entries", {"copy_src_block_ids": [1]}),
    ("copy_src_block_ids[0]: block 99", {"copy_src_block_ids": [99], "copy_dst_block_ids": [1]}),
    ("copy_dst_block_ids[0]: block 99", {"copy_src_block_ids": [1], "copy_dst_block_ids": [99]}),
    ("zeroed_block_ids[1]: block 16", {"zeroed_block_ids": [0, 16]}),
    ("joined_slots[0]: slot 0 is in the decode set already", {"joined_slots": [0]}),
    ("joined_slots[0]: slot 4 is free", {"joined_slots": [4]}),
    ("left_slots[0]: slot 3 is free", {"left_slots": [3]}),
    ("left_slots[1]: slot 0 is not in the decode set", {"left_slots": [0, 0]}),
    ("sit_out_slots[1]: slot 0 is not in the decode set", {"sit_out_slots": [0, 0]}),
    ("sit_out_slots[0]: slot 77", {"sit_out_slots": [77]}),
    ("row_counts: has 0 entries", {"row_slots": [0]}),
    ("row_slots[0]: slot 3 is free", {"rows": [(3, 0, 1, True)], "decode": 2}),
    ("row_slots[1]: slot 0 has two rows", {"rows": [(0, 2, 1, True), (0, 3, 1, True)], "decode": 1}),
    ("row_slots[0]: slot 0 sits out", {"rows": [(0, 2, 1, True)], "sit_out_slots": [0], "decode": 1}),
    ("row_starts[0]: slot 0 feeds position 2 next, not 1", {"rows": [(0, 1, 1, True)], "decode": 1}),
    ("row_starts[0]: slot 0 feeds position 2 next, not 3", {"rows": [(0, 3, 1, True)], "decode": 1}),
    ("row_counts[0]: must be at least 1", {"rows": [(0, 2, 0, True)], "decode": 1}),
    ("row_counts[0]: slot 0 has a history of 2", {"rows": [(0, 2, 2, True)], "decode": 1}),
    ("total_rows: is 3, the plan runs 2", {"decode": 2, "total_rows": 3}),
    ("total_tokens: is 9, the plan feeds 2", {"decode": 2, "total_tokens": 9}),
    ("draft_counts: drafts are not supported", {"decode": 2, "draft_counts": [0]}),
    ("draft_token_ids: drafts are not supported", {"decode": 2, "draft_token_ids": [1]}),
    ("settle: unknown mode 0", {"decode": 2, "settle": 0}),
    ("settle: unknown mode 9", {"decode": 2, "settle": 9}),
]


@pytest.mark.parametrize(("violation", "fields"), BAD_PLANS, ids=[name for name, _ in BAD_PLANS])
def test_a_bad_plan_is_refused_whole_and_names_the_field(violation: str, fields: dict[str, Any]) -> None:
    """B7, O7, A4, A5, A6."""
    violations = refuse(running_pair(), plan(3, **fields))
    assert any(line.startswith(violation) for line in violations), violations


BAD_ADMISSIONS: list[tuple[str, dict[str, Any]]] = [
    ("admissions[0].slot: slot 6 is not in", {"slot": 6}),
    ("admissions[0].slot: slot 0 is occupied by incarnation 100", {"slot": 0}),
    ("admissions[0].incarnation: must be at least 1", {"incarnation": 0}),
    ("admissions[0].incarnation: 101 is in use", {"incarnation": 101}),
    ("admissions[0].token_ids: has 0 tokens", {"token_ids": []}),
    ("admissions[0].token_ids: has 17 tokens, must be 1 .. 16", {"token_ids": [1] * 17}),
    ("admissions[0].token_ids[1]: 40 is not in 0 .. 39", {"token_ids": [1, 40]}),
    ("admissions[0].num_prompt_tokens: 0 is not in 1 .. 2", {"num_prompt_tokens": 0}),
    ("admissions[0].num_prompt_tokens: 3 is not in 1 .. 2", {"num_prompt_tokens": 3}),
    ("admissions[0].num_settled_tokens: 2 leaves nothing to feed", {"num_settled_tokens": 2}),
    ("admissions[0].num_settled_tokens: 1 do not fit 0 blocks", {"num_settled_tokens": 1, "block_ids": []}),
    ("admissions[0].block_ids[0]: block 16", {"block_ids": [16]}),
    ("admissions[0].block_ids: 5 blocks", {"block_ids": [1, 2, 3, 4, 5]}),
    ("admissions[0].sampling.temperature: -1.0", {"sampling": sampling(temperature=-1)}),
    ("admissions[0].sampling.temperature: nan", {"sampling": sampling(temperature=math.nan)}),
    ("admissions[0].sampling.temperature: inf", {"sampling": sampling(temperature=math.inf)}),
    ("admissions[0].sampling.top_p: 0.0", {"sampling": sampling(top_p=0)}),
    ("admissions[0].sampling.top_p: nan", {"sampling": sampling(top_p=math.nan)}),
    ("admissions[0].sampling.top_p: 1.5", {"sampling": sampling(top_p=1.5)}),
    ("admissions[0].sampling.min_p: -0.5", {"sampling": sampling(min_p=-0.5)}),
    ("admissions[0].sampling.min_p: 2.0", {"sampling": sampling(min_p=2)}),
    ("admissions[0].sampling.suppressed_token_ids[1]: 40", {"sampling": sampling(suppressed_token_ids=[0, 40])}),
]


@pytest.mark.parametrize(("violation", "fields"), BAD_ADMISSIONS, ids=[name for name, _ in BAD_ADMISSIONS])
def test_a_bad_admission_is_refused_whole_and_names_the_field(violation: str, fields: dict[str, Any]) -> None:
    """V5, J11, B7."""
    message = admission(**({"slot": 2, "token_ids": [5, 6], "incarnation": 9} | fields))
    violations = refuse(running_pair(), plan(3, decode=2, admissions=[message]))
    assert any(line.startswith(violation) for line in violations), violations


def test_two_admissions_may_not_share_a_slot_or_an_incarnation() -> None:
    twice = [admission(2, [5]), admission(2, [6], incarnation=8)]
    assert refuse(running_pair(), plan(3, decode=2, admissions=twice)) == [
        "admissions[1].slot: slot 2 is occupied by incarnation 102"
    ]
    same = [admission(2, [5]), admission(3, [6], incarnation=102)]
    assert refuse(running_pair(), plan(3, decode=2, admissions=same)) == [
        "admissions[1].incarnation: 102 is used twice"
    ]


def test_every_fault_is_named_up_to_a_bound() -> None:
    violations = refuse(running_pair(), plan(3, left_slots=[3] * 20))
    assert len(violations) == 17
    assert violations[-1] == "and 4 more"


def test_rows_and_tokens_are_bounded_by_the_budgets() -> None:
    """M3."""
    driver = TableDriver()
    admissions = [admission(slot, [1, 2, 3]) for slot in range(4)]
    violations = refuse(driver, plan(1, rows=[(slot, 0, 3, True) for slot in range(4)], admissions=admissions))
    assert violations == [
        "total_rows: 4 rows, max_num_seqs is 3",
        "total_tokens: 12 tokens, max_num_batched_tokens is 8",
    ]


def test_a_chunk_may_not_outgrow_its_blocks() -> None:
    """A6."""
    violations = refuse(
        TableDriver(), plan(1, rows=[(0, 0, 5, True)], admissions=[admission(0, [1] * 5, block_ids=[3])])
    )
    assert violations == ["row_counts[0]: slot 0 would feed position 4, its 1 blocks hold 4 positions"]


def test_a_decode_row_may_not_outgrow_its_blocks_and_may_with_a_new_one() -> None:
    """A6: no block-table entry past its capacity."""
    driver = TableDriver()
    driver.run(plan(1, rows=[(0, 0, 4, True)], admissions=[admission(0, [1] * 4, block_ids=[3])], joined_slots=[0]))
    assert refuse(driver, plan(2, decode=1)) == [
        "joined_slots: slot 0 would feed position 4, its 1 blocks hold 4 positions"
    ]
    batch, _ = driver.run(plan(2, decode=1, append_slots=[0], append_counts=[1], append_block_ids=[9]))
    assert batch.slot_mapping.tolist() == [36]


def test_no_position_reaches_max_model_len() -> None:
    """A6, overrun rows included."""
    driver = TableDriver()
    message = admission(0, [1] * 15, block_ids=[0, 1, 2, 3], num_settled_tokens=14)
    driver.run(plan(1, rows=[(0, 14, 1, True)], admissions=[message], joined_slots=[0]))
    driver.run(plan(2, decode=1))
    assert refuse(driver, plan(3, decode=1)) == ["joined_slots: slot 0 would feed position 16, max_model_len is 16"]


def test_a_row_inside_its_history_may_not_sample() -> None:
    """M1: only the chunk that feeds the newest known token samples."""
    driver = TableDriver()
    messages = [admission(0, [1, 2, 3])]
    assert refuse(driver, plan(1, rows=[(0, 0, 2, True)], admissions=messages)) == [
        "row_samples[0]: slot 0 would sample after position 1 inside its history of 3"
    ]
    assert refuse(driver, plan(1, decode=1, admissions=messages, joined_slots=[0])) == [
        "joined_slots: slot 0 would sample after position 0 inside its history of 3"
    ]


def test_a_slot_is_free_once_the_last_step_that_named_it_is_committed() -> None:
    """E3, E9."""
    driver = TableDriver()
    driver.run(start(1, 0, [1, 2]))
    driver.run(plan(2, decode=1))
    reuse = {
        "released_slots": [0],
        "released_incarnations": [100],
        "admissions": [admission(0, [5], incarnation=500)],
        "rows": [(0, 0, 1, True)],
    }
    assert refuse(driver, plan(3, committed=1, **reuse)) == [
        "admissions[0].slot: slot 0 is still named by step 2, which is not committed"
    ]
    batch, _ = driver.run(plan(3, committed=2, **reuse))
    assert batch.token_ids.tolist() == [5]


def test_blocks_are_not_written_by_a_plan_that_launches_nothing() -> None:
    assert refuse(running_pair(), plan(3, sit_out_slots=[0, 1], zeroed_block_ids=[1])) == [
        "zeroed_block_ids: a plan without rows launches nothing and cannot write blocks"
    ]


def test_a_position_is_fed_again_only_after_a_hole() -> None:
    """A4 and its one exception."""
    driver = running_pair()
    driver.run(plan(3, decode=2))
    again = plan(4, rows=[(0, 2, 1, True)], decode=1)
    refuse(driver, again)
    driver.table.note_unsampled(slot=0, incarnation=100, step_id=3, position=2)
    batch, _ = driver.run(again)
    assert batch.positions.tolist() == [2, 3]
    refuse(driver, plan(5, rows=[(0, 2, 1, True)], decode=1))


def test_releasing_a_member_takes_it_out_of_the_decode_set() -> None:
    driver = running_pair()
    batch, _ = driver.run(plan(3, decode=1, released_slots=[0], released_incarnations=[100]))
    assert batch.slots.tolist() == [1]


def test_a_member_that_left_keeps_its_slot_and_may_join_again() -> None:
    driver = running_pair()
    batch, _ = driver.run(plan(3, decode=1, left_slots=[0]))
    assert batch.slots.tolist() == [1]
    batch, _ = driver.run(plan(4, decode=2, joined_slots=[0]))
    assert batch.slots.tolist() == [1, 0]
    assert batch.positions.tolist() == [3, 2]
