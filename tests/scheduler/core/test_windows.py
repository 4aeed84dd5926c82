"""Window groups: what is dropped when, what an admission is charged, what a hit needs (rules N1 to N14, V3)."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import LaneConfig, RequestInfeasible, RowFault, WindowPool
from tests.scheduler.core.builders import LANE, Driver

PROMPT = tuple(range(100, 112))


def windowed(window: int, pool: int, **options: object) -> Driver:
    """A lane whose layers all see a window: blocks of 2, depth 1, 8 tokens a step."""
    sizes = {"num_blocks": 0, "block_size": 2, "max_num_batched_tokens": 8} | options
    return Driver.of(windows=(WindowPool(window=window, num_blocks=pool),), **sizes)


def mixed(window: int, pool: int, **options: object) -> Driver:
    """As `windowed`, with layers that see everything beside them: 16 blocks."""
    return windowed(window, pool, **({"num_blocks": 16} | options))


def commit(driver: Driver) -> dict[int, int]:
    """Commits the oldest step; every sample is 50 + its step. Returns them by request."""
    plan, rows = driver.books[LANE].steps[0]
    outcome = driver.commit(*[50 + plan.step_id for row in rows if row.samples])
    return dict(zip(map(int, outcome.keys), outcome.token_ids, strict=True))


def run_to_the_end(driver: Driver) -> dict[int, list[int]]:
    """Runs until nothing is left. Returns the outputs of each request."""
    outputs: dict[int, list[int]] = {}
    while True:
        while driver.plan() is not None:
            pass
        if not driver.books[LANE].steps:
            assert driver.scheduler.is_idle, "O8: not at rest"
            return outputs
        for key, token in commit(driver).items():
            outputs.setdefault(key, []).append(token)


# ------------------------------------------------------------------------------------------------ dropping


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_bl02_sliding_window_blocks_freed_on_the_settled_length(depth: int) -> None:
    """Window 4, blocks of 2, three windows' worth, and a second request that competes for every freed block.

    The checker holds every drop against P (rule N1); here it is said once by hand that S would have been too early.
    """
    driver = windowed(4, 9, overlap_depth=depth, num_slots=12)
    for key in (1, 2):
        driver.add(key, 3, max_tokens=12)
    early = 0
    while driver.scheduler.sequences:
        while driver.plan() is not None:
            pass
        for sequence in driver.scheduler.sequences.values():
            stay = sequence.stay
            assert stay is not None, "both fit"
            num_null = stay.windows[0].num_null
            assert num_null * 2 <= max(0, stay.num_settled - 4 + 1), "N1"
            early += num_null < max(0, stay.num_dispatched - 4 + 1) // 2
        commit(driver)
    run_to_the_end(driver)
    assert early > 0, "what is dispatched would have given blocks away too early"
    assert sorted(driver.free_window_blocks()) == list(range(9)), "E6"


@pytest.mark.parametrize(
    ("num_settled", "window", "needless"),
    [(0, 4, 0), (3, 4, 0), (4, 4, 0), (5, 4, 1), (6, 4, 1), (7, 4, 2), (1, 1, 0), (2, 1, 1), (9, 100, 0)],
)
def test_n1_a_block_is_needless_once_its_last_position_is_before_the_window(
    num_settled: int, window: int, needless: int
) -> None:
    """The query at P reads P - W + 1 .. P, by definition; written out position by position."""
    windows = windowed(window, 9).scheduler.lanes[LANE].windows
    assert windows is not None
    read = set(range(max(0, num_settled - window + 1), num_settled + 1))
    by_hand = next(block for block in range(10) if read & {2 * block, 2 * block + 1})
    assert windows.groups[0].num_needless(num_settled) == needless == by_hand


def test_n2_the_lowest_position_in_flight_decides() -> None:
    """A chunk of 8 positions in flight holds on to what its first position reads."""
    driver = windowed(4, 12, max_num_batched_tokens=8)
    driver.add(1, 24, max_tokens=4)
    driver.must_plan()  # positions 0 .. 7
    driver.must_plan()  # 8 .. 15: at P = 0 nothing may go
    assert driver.window_table(1) == list(range(8))
    driver.commit()
    driver.must_plan()  # P = 8: position 8 reads 5 .. 8
    assert driver.window_table(1)[:3] == [None, None, 2]


def test_n3_a_plan_says_which_entries_are_null() -> None:
    """An admission behind a hit carries the window's blocks only, and how many null entries stand before them."""
    driver = mixed(3, 10, policy={"prefix_caching": True})
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    driver.add(2, (*PROMPT, 7, 8), max_tokens=2)
    plan = driver.must_plan()
    (admission,) = plan.admissions
    assert admission.num_settled_tokens == 12
    assert admission.block_counts == (7, 2)
    assert admission.null_counts == (0, 5)
    assert len(admission.block_ids) == 9


def test_appends_name_their_group() -> None:
    """A member at a border gets a block in every group, and the plan says which is which."""
    driver = mixed(4, 10)
    driver.add(1, 4, max_tokens=6)
    plan = driver.must_plan()
    assert plan.append_groups == ()
    plan = driver.must_plan()
    assert (len(plan.append_slots), plan.append_groups) == (2, (0, 1))


def test_one_group_needs_no_numbers() -> None:
    """A lane whose layers all see the same window names no groups."""
    driver = windowed(4, 10)
    driver.add(1, 4, max_tokens=6)
    assert driver.must_plan().admissions[0].block_counts == ()
    plan = driver.must_plan()
    assert (len(plan.append_slots), plan.append_groups) == (1, ())


# ------------------------------------------------------------------------------------------------ admission


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 11, 30])
def test_n11_v3_what_is_charged_is_enough_for_any_prompt(depth: int, window: int, prompt: int) -> None:
    """The smallest pool that accepts a lone sequence carries it through, whatever its length."""
    pool = WindowPool(window=window, num_blocks=1).most_blocks(2, depth)
    driver = windowed(window, pool, overlap_depth=depth, num_slots=12, max_model_len=64)
    driver.add(1, prompt, max_tokens=20)
    assert len(run_to_the_end(driver)[1]) == 20


def test_v3_a_pool_that_cannot_hold_the_window_refuses_long_requests_only() -> None:
    driver = windowed(9, 4, max_model_len=64)
    assert driver.scheduler.lanes[LANE].num_cache_tokens == 8
    with pytest.raises(RequestInfeasible) as refused:
        driver.add(1, 4, max_tokens=6)
    assert (refused.value.needed_tokens, refused.value.available_tokens) == (9, 8)
    driver.add(2, 4, max_tokens=5)
    assert len(run_to_the_end(driver)[2]) == 5


def test_a_prompt_longer_than_the_pool_goes_chunk_by_chunk() -> None:
    """Eight blocks of 2, a prompt of 30: chunks are cut to what fits, and no block is asked for in vain."""
    driver = windowed(4, 8)
    driver.add(1, 30, max_tokens=3)
    counts: list[int] = []
    while (plan := driver.plan()) is not None or driver.books[LANE].steps:
        if plan is not None:
            counts += plan.row_counts
        else:
            commit(driver)
    assert sum(counts) == 30
    assert counts[:3] == [8, 8, 4]


def test_n11_a_newcomer_enters_only_while_its_charge_is_there() -> None:
    """Two sequences of a charge of 4 in a pool of 9: a third waits, and headroom is kept for those who run."""
    driver = windowed(4, 9)
    for key in (1, 2, 3):
        driver.add(key, 12, max_tokens=2)
    driver.must_plan()
    assert [event.key for event in driver.outcome.admitted] == [1, 2]
    assert len(run_to_the_end(driver)) == 3


def test_a_newcomer_enters_when_a_chunk_gives_back_what_it_reserved_beyond_its_charge() -> None:
    """Without a cache nothing else would say that there is room again before the first request ends."""
    driver = windowed(4, 12, max_num_batched_tokens=16, max_model_len=64)
    driver.add(1, 40, max_tokens=20)
    driver.must_plan()
    driver.add(2, 12, max_tokens=1)
    driver.must_plan()
    assert driver.outcome.admitted == ()
    while not driver.outcome.admitted:
        commit(driver)
        driver.plan()
    assert [event.key for event in driver.outcome.admitted] == [2]
    assert len(driver.scheduler.sequences) == 2
    run_to_the_end(driver)


def test_e7_a_member_waits_for_what_a_chunk_has_reserved_beyond_its_charge() -> None:
    """A chunk in flight holds more than its charge; the member sits out a step and nobody is preempted."""
    driver = windowed(8, 16, max_model_len=64)
    for key in (1, 2):
        driver.add(key, 2, max_tokens=30)
    driver.must_plan()
    driver.add(3, 40, max_tokens=1)
    sat_out = 0
    while driver.scheduler.sequences:
        while (plan := driver.plan()) is not None:
            sat_out += len(plan.sit_out_slots)
        commit(driver)
    assert (driver.scheduler.totals.preemptions, sat_out > 0) == (0, True)


def test_a_pool_that_is_too_small_for_all_preempts_the_youngest() -> None:
    driver = windowed(30, 20, max_model_len=40)
    for key in (1, 2, 3):
        driver.add(key, 4, max_tokens=30)
    outputs = run_to_the_end(driver)
    assert [len(outputs[key]) for key in (1, 2, 3)] == [30, 30, 30]
    assert driver.scheduler.totals.preemptions > 0


def test_sizes_are_checked() -> None:
    sizes = {"num_slots": 2, "max_num_seqs": 1, "max_num_batched_tokens": 4, "max_model_len": 8, "block_size": 2}
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        LaneConfig(num_blocks=0, **sizes)
    with pytest.raises(ValueError, match="window of a window group"):
        WindowPool(window=0, num_blocks=1)
    with pytest.raises(ValueError, match="num_blocks of a window group"):
        WindowPool(window=1, num_blocks=0)


# ------------------------------------------------------------------------------------------------ prefix cache


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
@pytest.mark.parametrize("group", ["mixed", "windowed"])
def test_n12_a_hit_needs_the_window_before_its_end_and_nothing_else(length: int, group: str) -> None:
    """A prompt shares `length` tokens with one that has ended (rule N13: lengths around W and B).

    Dropped blocks are remembered while nobody needs their room, so the hit is the longest there can be.
    """
    driver = (mixed if group == "mixed" else windowed)(4, 16, policy={"prefix_caching": True})
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    driver.add(2, (*PROMPT[:length], 7), max_tokens=1)
    (admission,) = driver.must_plan().admissions
    assert admission.num_settled_tokens == length // 2 * 2
    run_to_the_end(driver)


def test_n8_n12_without_the_window_the_rest_is_computed_again_from_exact_states() -> None:
    """The full layers know all 12 positions, the window pool has forgotten: what is behind the last hit is fed."""
    driver = mixed(4, 5, num_blocks=32, policy={"prefix_caching": True})
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    driver.add(2, tuple(range(300, 309)), max_tokens=1)  # takes every block of the window pool
    run_to_the_end(driver)
    lane = driver.scheduler.lanes[LANE]
    driver.add(3, (*PROMPT, 7), max_tokens=1)
    plan = driver.must_plan()
    keys = driver.sequence(3).block_keys(6, 2, "")
    assert len(lane.blocks.find(keys)) == 6, "the full layers know the whole prefix"
    assert plan.admissions[0].num_settled_tokens == 0
    assert sum(plan.row_counts) == 8
    run_to_the_end(driver)


def test_h3_window_blocks_of_a_failed_row_are_forgotten() -> None:
    """Whatever a row with a fault has written, those it dropped long ago included, is shared with nobody."""
    driver = windowed(3, 12, policy={"prefix_caching": True})
    driver.add(1, PROMPT, max_tokens=3)
    driver.must_plan()
    driver.must_plan()
    driver.commit()
    slot = driver.must_plan().joined_slots[0]
    driver.commit(empty=(), faults={slot: RowFault.NON_FINITE})
    driver.commit(faults={slot: RowFault.POSITION_MISMATCH})
    driver.add(2, (*PROMPT, 7), max_tokens=1)
    assert driver.must_plan().admissions[0].num_settled_tokens == 0
    assert driver.scheduler.lanes[LANE].windows is not None


def test_a_fork_feeds_its_tail_again() -> None:
    """The parent's tail block may be gone from a window, so it is not copied."""
    driver = mixed(4, 12, policy={"prefix_caching": True})
    parent = driver.add(1, PROMPT[:7], max_tokens=4)
    driver.must_plan()
    driver.must_plan()
    driver.commit(50)
    driver.add(2, PROMPT[:7], max_tokens=4, fork_of=parent)
    plan = driver.must_plan()
    assert (plan.copy_src_block_ids, plan.admissions[0].num_settled_tokens) == ((), 6)
    run_to_the_end(driver)


def test_n14_a_preempted_request_feeds_its_last_output_first_after_its_history() -> None:
    """A loss: the history is fed from the start, and the row that feeds position H - 1 samples, once."""
    driver = windowed(4, 9, policy={"prefix_caching": True})
    driver.add(1, 5, max_tokens=8)
    driver.must_plan()
    driver.must_plan()
    driver.commit(60)
    driver.commit(61)
    driver.lose()
    driver.reopen(num_blocks=0, block_size=2, windows=(WindowPool(window=4, num_blocks=9),))
    plan = driver.must_plan()
    assert plan.admissions[0].token_ids[-2:] == (60, 61)
    assert (plan.row_starts, plan.row_counts, plan.row_samples) == ((0,), (7,), (True,))
    assert len(run_to_the_end(driver)[1]) == 6
