"""Preemption, waiting instead of preempting, and lost lanes: nothing is lost, repeated or starved."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import Admitted, FinishReason, Preempted, RequestKey, StepResult
from tests.scheduler.core.builders import EOS, LANE, OTHER_LANE, Driver


def two_at_a_block_edge(*, overlap_depth: int = 1, **fields: object) -> Driver:
    """Two requests of 3 prompt tokens, blocks of 4, 3 blocks: each has one block, one is free.

    The first to feed position 4 takes the last block; the second has none.
    """
    driver = Driver.of(overlap_depth=overlap_depth, num_blocks=3, max_model_len=12, max_num_seqs=2)
    driver.add(1, 3, max_tokens=9, **fields)
    driver.add(2, 3, max_tokens=9, **fields)
    plan = driver.must_plan()
    assert [a.block_ids for a in plan.admissions] == [(0,), (1,)]
    return driver


def test_the_token_in_flight_at_a_preemption_is_delivered_once() -> None:
    """G1, G3, G4, C5, BL-03, BL-10: it extends the history before the resume, which carries the whole of it."""
    driver = two_at_a_block_edge()
    driver.must_plan()
    driver.commit(10, 20)
    plan = driver.must_plan()
    assert driver.outcome.preempted == (Preempted(RequestKey(2)),)
    assert (plan.append_slots, plan.append_block_ids, plan.total_rows) == ((0,), (2,), 1)
    assert (plan.released_slots, plan.released_incarnations) == ((1,), (2,))
    # The step that fed position 3 of request 2 is still in flight: the block is quarantined, it may not resume.
    assert driver.scheduler.lanes[LANE].blocks.num_quarantined == 1
    outcome = driver.commit(11, 21)
    assert list(zip(outcome.keys, outcome.token_ids, strict=True)) == [(1, 11), (2, 21)]
    assert outcome.num_overrun_rows == 0
    assert driver.outputs(2) == [20, 21]
    assert driver.free_blocks() == (1,)
    # Request 1 runs to its end; then request 2 resumes from all it has said, in a new incarnation.
    for token in range(12, 19):
        driver.plan()
        driver.commit(token)
    plan = driver.must_plan()
    assert driver.outcome.admitted == (Admitted(RequestKey(2), LANE, first_time=False),)
    (admission,) = plan.admissions
    assert admission.incarnation == 3
    assert admission.token_ids == (100, 101, 102, 20, 21)
    assert (admission.num_prompt_tokens, admission.num_settled_tokens) == (3, 0)
    assert (plan.row_starts, plan.row_counts, plan.row_samples) == ((0,), (5,), (True,))
    assert driver.commit(22).token_ids == [22]
    assert driver.sequence(2).num_preemptions == 1
    assert driver.scheduler.totals.preemptions == 1


def test_without_overlap_the_blocks_of_the_victim_are_free_at_once() -> None:
    """E1, G4, D = 0: nothing is in flight at the preemption."""
    driver = two_at_a_block_edge(overlap_depth=0)
    driver.commit(10, 20)
    driver.must_plan()
    driver.commit(11, 21)
    driver.must_plan()
    assert driver.outcome.preempted == (Preempted(RequestKey(2)),)
    assert driver.free_blocks() == (1,)
    assert driver.sequence(2).stay is None


def test_a_preempted_request_may_end_on_its_token_in_flight() -> None:
    """G1, F1, D8: the delivered token is EOS: the request ends in the queue, its resources at the fence."""
    driver = two_at_a_block_edge(stop_token_ids=frozenset({EOS}))
    driver.must_plan()
    driver.commit(10, 20)
    driver.must_plan()
    outcome = driver.commit(11, EOS)
    assert [(f.key, f.reason, f.num_output_tokens) for f in outcome.finished] == [(2, FinishReason.STOP, 2)]
    assert RequestKey(2) not in driver.scheduler.sequences
    assert len(driver.scheduler.waiting) == 0


def test_abort_of_a_preempted_request_suppresses_its_token_in_flight() -> None:
    """F1, F2: preempted, then aborted, then its last row completes."""
    driver = two_at_a_block_edge()
    driver.must_plan()
    driver.commit(10, 20)
    driver.must_plan()
    finished = driver.scheduler.abort(RequestKey(2))
    assert finished is not None
    assert finished.num_output_tokens == 1
    outcome = driver.commit(11, 21)
    assert (outcome.keys, outcome.num_overrun_rows) == ([1], 1)


def test_two_frames_in_flight_at_a_preemption_are_both_delivered() -> None:
    """G2, BL-03, D = 2: as many frames as were scheduled, not one."""
    driver = two_at_a_block_edge(overlap_depth=2)
    driver.must_plan()
    driver.must_plan()
    assert driver.outcome.preempted == (Preempted(RequestKey(2)),)
    assert driver.commit(10, 20).token_ids == [10, 20]
    assert driver.plan() is not None
    assert driver.commit(11, 21).token_ids == [11, 21]
    assert driver.outputs(2) == [20, 21]
    assert driver.sequence(2).stay is None


def test_repeated_preemption_equals_an_undisturbed_run() -> None:
    """BL-03, BL-04, BL-10, G7, O8: tokens depend on the history only; both windows; preemptions stay bounded."""

    def run(num_blocks: int, depth: int) -> tuple[dict[int, list[int]], int]:
        driver = Driver.of(
            overlap_depth=depth, num_blocks=num_blocks, block_size=2, max_model_len=14, max_num_seqs=3
        )
        lengths = {1: 3, 2: 3, 3: 3}
        for key, length in lengths.items():
            driver.add(key, length, max_tokens=10)
        outputs: dict[int, list[int]] = {key: [] for key in lengths}
        key_of: dict[int, int] = {}
        for _ in range(400):
            plan = driver.plan()
            for sequence in driver.scheduler.sequences.values():
                if sequence.stay is not None:
                    key_of[sequence.stay.incarnation] = sequence.request.key
            if plan is not None:
                continue
            if driver.scheduler.is_idle:
                return outputs, driver.scheduler.totals.preemptions
            assert driver.books[LANE].steps, "O8: nothing is planned, nothing is in flight, and not idle"
            _, rows = driver.books[LANE].steps[0]
            seen: dict[int, int] = {}
            tokens: list[int] = []
            for row in rows:
                key = key_of[row.incarnation]
                if row.samples:
                    tokens.append(1000 * key + len(outputs[key]) + seen.get(key, 0))
            outcome = driver.commit(*tokens)
            for key, token in zip(outcome.keys, outcome.token_ids, strict=True):
                outputs[key].append(token)
        raise AssertionError("O8: not at rest")

    expected = {key: [1000 * key + index for index in range(10)] for key in (1, 2, 3)}
    for depth in (0, 1, 2):
        assert run(40, depth) == (expected, 0)
        outputs, preemptions = run(7, depth)
        assert outputs == expected
        assert 0 < preemptions <= 30, "at most one per delivered token"


@pytest.mark.parametrize("depth", [0, 1])
def test_the_youngest_loses_its_place_between_two_chunks(depth: int) -> None:
    """G5, G6, M4, BL-06, BL-25: the victim is the youngest running request, here halfway through its prompt."""
    driver = Driver.of(
        overlap_depth=depth,
        policy={"skip_ahead_window": 0},
        num_blocks=4,
        max_model_len=16,
        max_num_batched_tokens=2,
        max_num_seqs=2,
    )
    driver.add(1, 4, max_tokens=12)
    driver.must_plan()
    driver.commit()
    driver.add(2, 8, max_tokens=4)
    driver.add(3, 1, max_tokens=1)
    driver.must_plan()
    driver.commit(10)
    for position in range(4):
        plan = driver.must_plan()
        assert (plan.row_slots, plan.row_starts, plan.total_rows) == ((1,), (position,), 2)
        if len(driver.books[LANE].steps) > depth:
            driver.commit(11)
    plan = driver.plan()
    assert driver.outcome.preempted == (Preempted(RequestKey(2)),)
    assert (plan is None) == (depth == 1), "with a chunk in flight its blocks must be waited for"
    if plan is None:
        assert driver.scheduler.lanes[LANE].blocks.num_quarantined == 2
        driver.commit(12)
        plan = driver.must_plan()
    assert (plan.row_slots, plan.total_tokens, plan.released_slots) == ((), 1, (1,))
    assert (plan.append_slots, len(plan.append_block_ids), plan.sit_out_slots) == ((0,), 1, ())
    assert [s.request.key for s in driver.scheduler.waiting] == [2, 3]


def test_sit_out_names_the_waiting_row_and_keeps_the_others_going() -> None:
    """E7, BL-11, BL-25: two rows cross together with one block free; the younger sits out one step."""
    driver = Driver.of(num_blocks=4, max_model_len=16, max_num_seqs=3)
    driver.add(1, 3, max_tokens=13)
    driver.add(2, 3, max_tokens=13)
    driver.add(3, 3, max_tokens=2)
    driver.must_plan()
    plan = driver.must_plan()  # the last row of request 3: its block is coming back
    assert plan.total_rows == 3
    driver.commit(10, 20, 30)
    plan = driver.must_plan()
    assert driver.outcome.preempted == ()
    assert (plan.append_slots, plan.append_block_ids) == ((0,), (3,))
    assert (plan.sit_out_slots, plan.left_slots, plan.total_rows) == ((1,), (2,), 1)
    assert len(driver.commit(11, 21, 31).finished) == 1
    plan = driver.must_plan()
    assert (plan.append_slots, plan.append_block_ids, plan.sit_out_slots) == ((1,), (2,), ())
    assert (plan.released_slots, plan.total_rows) == ((2,), 2)
    driver.commit(12)
    driver.commit(13, 22)
    assert (driver.outputs(1), driver.outputs(2)) == ([10, 11, 12, 13], [20, 21, 22])


def test_when_every_row_waits_there_is_no_plan() -> None:
    """E7, B9: all rows sit out: no empty step is sent; the completion in flight brings the blocks."""
    driver = Driver.of(num_blocks=4, max_model_len=16, max_num_seqs=2)
    driver.add(1, 4, max_tokens=12)
    driver.add(2, 4, max_tokens=5)
    driver.must_plan()
    assert driver.must_plan().append_block_ids == (2, 3)
    driver.commit(10, 20)
    for _ in range(3):
        driver.must_plan()
        driver.commit(11, 21)
    assert driver.plan() is None
    assert driver.outcome.preempted == ()
    assert driver.scheduler.lanes[LANE].num_returning_blocks == 2
    assert [f.key for f in driver.commit(12, 22).finished] == [2]
    plan = driver.must_plan()
    assert (plan.append_slots, plan.append_block_ids, plan.released_slots) == ((0,), (1,), (1,))


def test_no_more_rows_wait_than_blocks_return() -> None:
    """E7, E8: three rows cross, one block is free, one returns: one takes, one waits, the youngest gives way."""
    driver = Driver.of(num_blocks=5, max_model_len=20, max_num_seqs=4)
    for key in (1, 2, 3):
        driver.add(key, 3, max_tokens=17)
    driver.add(4, 3, max_tokens=2)
    driver.must_plan()
    driver.must_plan()
    driver.commit(10, 20, 30, 40)
    plan = driver.must_plan()
    assert (plan.append_slots, plan.append_block_ids, plan.sit_out_slots) == ((0,), (4,), (1,))
    assert driver.outcome.preempted == (Preempted(RequestKey(3)),)
    assert (plan.released_slots, plan.left_slots, plan.total_rows) == ((2,), (3,), 1)
    assert driver.commit(11, 21, 31, 41).token_ids == [11, 21, 31, 41]
    assert driver.must_plan().append_slots == (1,)


def test_nobody_is_admitted_and_preempted_by_the_same_call() -> None:
    """E8: two rows cross into new blocks while a newcomer takes all but one of the free ones."""
    driver = Driver.of(overlap_depth=0, num_blocks=5, max_model_len=20)
    driver.add(1, 4, max_tokens=9)
    driver.add(2, 4, max_tokens=9)
    driver.must_plan()
    driver.commit(10, 20)
    driver.add(3, 8, max_tokens=2)
    driver.must_plan()
    assert not {e.key for e in driver.outcome.admitted} & {e.key for e in driver.outcome.preempted}


# ------------------------------------------------------------------------------------------------ lost lanes


def test_a_lost_lane_keeps_history_and_order() -> None:
    """O1, G3: running requests wait again by arrival, before those never admitted, with what they have said."""
    driver = Driver.of(max_num_seqs=3, num_lanes=2)
    for key in range(1, 8):
        driver.add(key, 2)
    driver.plan(LANE)
    driver.commit(*[10] * len(driver.books[LANE].steps[0][1]))
    driver.must_plan(LANE)
    lost = driver.lose(LANE)
    assert lost == [1, 3, 5]
    assert [s.request.key for s in driver.scheduler.waiting] == [1, 3, 5, 7]
    assert [driver.outputs(key) for key in lost] == [[10]] * 3
    driver.lose(OTHER_LANE)
    assert [s.request.key for s in driver.scheduler.waiting] == [1, 2, 3, 4, 5, 6, 7]
    driver.reopen(LANE, max_num_seqs=3)
    plan = driver.must_plan(LANE)
    assert [a.token_ids for a in plan.admissions] == [(100, 101, 10), (100, 101), (100, 101, 10)]
    assert [event.first_time for event in driver.outcome.admitted] == [False, False, False]
    assert plan.step_id == 1


def test_a_lane_lost_while_a_preempted_request_owes_a_token() -> None:
    """G1, O1: the token in flight is gone with the lane; the request may be admitted again at once."""
    driver = two_at_a_block_edge()
    driver.must_plan()
    driver.commit(10, 20)
    driver.must_plan()
    assert driver.outcome.preempted == (Preempted(RequestKey(2)),)
    assert driver.lose() == [1]
    driver.reopen()
    plan = driver.must_plan()
    assert [a.token_ids for a in plan.admissions] == [(100, 101, 102, 10), (100, 101, 102, 20)]


def test_a_lane_lost_with_every_kind_of_row() -> None:
    """O1, D8: feeding a prompt, decoding, last output in flight, aborted behind a fence: each once, or not."""
    driver = Driver.of(max_num_batched_tokens=8)
    driver.add(1, 2, max_tokens=9)
    driver.add(2, 2, max_tokens=2)
    driver.add(3, 2, max_tokens=9)
    driver.must_plan()
    driver.add(4, 20, max_tokens=9)
    driver.must_plan()
    assert driver.scheduler.abort(RequestKey(3)) is not None
    assert driver.lose() == [4, 1, 2]
    assert [s.request.key for s in driver.scheduler.waiting] == [1, 2, 4]


def test_results_of_an_older_epoch_are_counted_and_dropped() -> None:
    """B5, O2: a ghost with the same step id and rows changes nothing."""
    driver = Driver.of()
    driver.add(1)
    driver.must_plan()
    ghost = driver.result(66)
    driver.lose()
    driver.reopen(epoch=2)
    driver.must_plan()
    same_rows = StepResult(
        epoch=1,
        step_id=ghost.step_id,
        incarnations=driver.result(66).incarnations,
        token_counts=None,
        token_ids=[66],
        faults={},
    )
    for stale in (ghost, same_rows):
        outcome = driver.scheduler.commit(LANE, stale)
        assert (outcome.keys, outcome.finished, outcome.num_rows) == ([], [], 0)
    driver.scheduler.fail_step(LANE, 1, ghost.step_id)
    assert driver.scheduler.totals.stale_results == 2
    assert driver.scheduler.lanes[LANE].num_stale_results == 2
    assert driver.counters(1) == (4, 4, 0, 1)
    assert driver.commit(10).token_ids == [10]
