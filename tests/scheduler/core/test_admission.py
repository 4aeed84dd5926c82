"""Who gets a slot, on which lane, in which order; and who is refused."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import (
    LaneConfig,
    LaneId,
    RequestInfeasible,
    RequestKey,
    Scheduler,
    SchedulerConfig,
    UnknownLane,
)
from tests.scheduler.core.builders import LANE, OTHER_LANE, Driver, make_lane_config, make_request, make_scheduler


def admitted(driver: Driver) -> list[tuple[int, int]]:
    """(key, lane) of what the newest plan admitted."""
    return [(event.key, event.lane_id) for event in driver.outcome.admitted]


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_exactly_at_the_context_limit_is_admitted_and_runs(block_size: int) -> None:
    """BL-23, V3, A6: prompt + max_tokens = max_model_len, cache for just that, then a small one behind it."""
    num_blocks = -(-31 // block_size)
    driver = Driver.of(block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=32)
    driver.add(1, 20, max_tokens=12)
    driver.add(2, 1, max_tokens=1)
    ended: list[int] = []
    while not driver.scheduler.is_idle:
        if driver.plan() is None:
            _, rows = driver.books[LANE].steps[0]
            ended += [f.key for f in driver.commit(*[7] * len(rows)).finished]
    assert sorted(ended) == [1, 2]
    assert driver.scheduler.totals.output_tokens == 13


def test_one_cache_position_too_few_is_refused() -> None:
    """V3, G9, BL-23: 31 positions are needed for 32 tokens, the last one is never fed."""
    fits = make_scheduler(block_size=1, num_blocks=31)
    fits.add_request(make_request(1, 20, max_tokens=12))
    too_small = make_scheduler(block_size=1, num_blocks=30)
    with pytest.raises(RequestInfeasible) as caught:
        too_small.add_request(make_request(1, 20, max_tokens=12))
    assert (caught.value.needed_tokens, caught.value.available_tokens) == (31, 30)
    assert "31" in str(caught.value)
    assert "30" in str(caught.value)
    assert too_small.is_idle


@pytest.mark.parametrize("prompt", [32, 320])
def test_the_refusal_of_a_long_prompt_says_why(prompt: int) -> None:
    """V2, BL-22: both numbers, and the need is the larger one."""
    with pytest.raises(RequestInfeasible) as caught:
        make_scheduler().add_request(make_request(1, prompt))
    assert caught.value.needed_tokens > caught.value.available_tokens


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize(("prompt", "accepted"), [(31, True), (32, False), (33, False), (320, False)])
def test_prompt_lengths_around_the_context_limit(prompt: int, accepted: bool, max_tokens: int) -> None:
    """BL-22, V2: limit - 1 works (one output), limit and beyond are refused at once."""
    driver = Driver.of(max_num_batched_tokens=32)
    if not accepted:
        with pytest.raises(RequestInfeasible):
            driver.add(1, prompt, max_tokens=max_tokens)
        assert driver.scheduler.is_idle
        return
    driver.add(1, prompt, max_tokens=max_tokens)
    driver.must_plan()
    (finished,) = driver.commit(7).finished
    assert (finished.reason.value, finished.num_output_tokens) == ("length", 1)


def test_the_context_limit_is_that_of_the_smallest_lane_and_the_cache_that_of_the_largest() -> None:
    """V3: a request must fit some lane whole, and its answer must not depend on which."""
    scheduler = make_scheduler(num_blocks=4)
    scheduler.open_lane(OTHER_LANE, make_lane_config(max_model_len=24), epoch=1)
    scheduler.add_request(make_request(1, 20, max_tokens=12))
    assert scheduler.sequences[RequestKey(1)].max_total_tokens == 24
    outcome = scheduler.plan(LANE)
    assert [event.lane_id for event in outcome.admitted] == [OTHER_LANE]
    assert outcome.plan is None


def test_without_a_lane_nothing_is_accepted() -> None:
    """O1: sizes are unknown, so the caller hears UnknownLane; so does a call for a lane that is not open."""
    scheduler = Scheduler(SchedulerConfig())
    with pytest.raises(UnknownLane):
        scheduler.add_request(make_request(1))
    for call in (scheduler.plan, scheduler.lose_lane):
        with pytest.raises(UnknownLane, match="lane 7"):
            call(LaneId(7))


def test_a_key_is_used_once() -> None:
    """D8: the shell mints keys; a repeated one is a bug there."""
    driver = Driver.of()
    driver.add(1)
    with pytest.raises(AssertionError, match="unique"):
        driver.add(1)


def test_an_open_lane_is_not_opened_again() -> None:
    """O2: a new epoch needs the old one to be lost first."""
    with pytest.raises(AssertionError, match="open"):
        make_scheduler().open_lane(LANE, make_lane_config(), epoch=2)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"num_slots": 3}, "num_slots"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
    ],
)
def test_lane_sizes_are_checked_by_name(fields: dict[str, int], name: str) -> None:
    """V5: what a worker states is validated once."""
    with pytest.raises(ValueError, match=name):
        make_lane_config(**fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"overlap_depth": -1}, "overlap_depth"),
        ({"overlap_depth": 9}, "overlap_depth"),
        ({"skip_ahead_window": -1}, "skip_ahead_window"),
        ({"max_times_passed": -1}, "max_times_passed"),
        ({"max_described_tokens": 0}, "max_described_tokens"),
    ],
)
def test_policy_limits_are_checked_by_name(fields: dict[str, int], name: str) -> None:
    """V5."""
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**fields)  # type: ignore[arg-type]


def test_lane_arithmetic() -> None:
    """Blocks are rounded up; the pool holds num_blocks * block_size positions."""
    config: LaneConfig = make_lane_config(num_blocks=3, block_size=4)
    assert [config.num_blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert config.num_cache_tokens(1) == 12


# ------------------------------------------------------------------------------------------------ order


def test_first_come_first_served_up_to_the_row_limit() -> None:
    """F4: rows are given in order of arrival; blocks are taken from the front of the free list."""
    driver = Driver.of(max_num_seqs=2)
    for key in (1, 2, 3):
        driver.add(key, 6)
    plan = driver.must_plan()
    assert admitted(driver) == [(1, 0), (2, 0)]
    assert [(a.slot, a.block_ids) for a in plan.admissions] == [(0, (0, 1)), (1, (2, 3))]


def test_without_a_free_slot_nobody_is_admitted() -> None:
    """E9: a lane with fewer slots than D + 1 full batches waits for the fence instead of failing."""
    driver = Driver.of(max_num_seqs=1, num_slots=1)
    driver.add(1, 2, max_tokens=1)
    driver.add(2, 2, max_tokens=1)
    driver.must_plan()
    assert driver.plan() is None
    assert admitted(driver) == []
    driver.commit(7)
    driver.must_plan()
    assert admitted(driver) == [(2, 0)]


def full_lane(*, policy: dict[str, int], num_small: int) -> Driver:
    """A lane with 4 of 8 blocks in use, a head that needs 5 (request 2), and small ones behind it (3, 4, ...)."""
    driver = Driver.of(overlap_depth=0, num_blocks=8, max_num_seqs=8, num_slots=16, policy=policy)
    driver.add(1, 15, max_tokens=17)
    driver.must_plan()
    driver.commit(7)
    driver.add(2, 20, max_tokens=2)
    for key in range(3, 3 + num_small):
        driver.add(key, 1, max_tokens=1)
    return driver


@pytest.mark.parametrize(("window", "expected"), [(0, []), (1, [3])])
def test_skip_ahead_is_bounded_by_the_window(window: int, expected: list[int]) -> None:
    """O8: with window w at most w requests behind a blocked head are tried; 0 is strict order."""
    driver = full_lane(policy={"skip_ahead_window": window}, num_small=1)
    driver.must_plan()
    assert [key for key, _ in admitted(driver)] == expected


def test_skip_ahead_gives_up_after_a_window_of_blocked_requests() -> None:
    """O8: two blocked ones exhaust a window of 1, the small one behind them is not tried."""
    driver = full_lane(policy={"skip_ahead_window": 1}, num_small=0)
    driver.add(3, 20, max_tokens=2)
    driver.add(4, 1, max_tokens=1)
    driver.must_plan()
    assert admitted(driver) == []


def test_nobody_passes_a_request_that_was_passed_often_enough() -> None:
    """O8: after max_times_passed the head blocks everybody until it is admitted."""
    driver = full_lane(policy={"max_times_passed": 2}, num_small=0)
    for key in (10, 11):
        driver.add(key, 1, max_tokens=1)
        driver.must_plan()
        assert admitted(driver) == [(key, 0)]
        _, rows = driver.books[LANE].steps[0]
        driver.commit(*[8] * len(rows))
    driver.add(12, 1, max_tokens=1)
    driver.must_plan()
    assert (admitted(driver), driver.sequence(2).times_passed) == ([], 2)
    driver.commit(8)
    driver.scheduler.abort(RequestKey(1))
    driver.must_plan()
    assert admitted(driver) == [(2, 0), (12, 0)]
    assert driver.sequence(2).times_passed == 0


def test_one_admission_pass_respects_max_times_passed() -> None:
    """O8: "how often others may pass a blocked request" also holds for several newcomers in one call."""
    driver = full_lane(policy={"max_times_passed": 1}, num_small=3)
    driver.must_plan()
    assert driver.sequence(2).times_passed <= 1


def test_headroom_is_kept_for_those_who_run() -> None:
    """E8: one block stays free beside running requests; an empty lane gives its last block."""
    driver = Driver.of(overlap_depth=0, num_blocks=4, max_model_len=16)
    driver.add(1, 8, max_tokens=8)
    driver.add(2, 8, max_tokens=8)
    driver.must_plan()
    assert admitted(driver) == [(1, 0)]
    driver = Driver.of(overlap_depth=0, num_blocks=4, max_model_len=17)
    driver.add(1, 16, max_tokens=1)
    driver.must_plan()
    assert admitted(driver) == [(1, 0)]
    assert driver.free_blocks() == ()


# ------------------------------------------------------------------------------------------------ lanes


def test_two_lanes_share_the_load() -> None:
    """Admission goes to the lane with more free rows, then more free blocks; any lane's plan admits for all."""
    driver = Driver.of(num_lanes=2)
    for key in range(1, 6):
        driver.add(key)
    first = driver.must_plan(LANE)
    assert admitted(driver) == [(1, 0), (2, 1), (3, 0), (4, 1), (5, 0)]
    assert [a.incarnation for a in first.admissions] == [1, 3, 5]
    second = driver.must_plan(OTHER_LANE)
    assert admitted(driver) == []
    assert [(a.slot, a.incarnation) for a in second.admissions] == [(0, 2), (1, 4)]


def test_lanes_do_not_wait_for_each_other() -> None:
    """Step ids and windows are per lane."""
    driver = Driver.of(num_lanes=2)
    driver.add(1)
    driver.add(2)
    for lane_id in (LANE, OTHER_LANE):
        driver.must_plan(lane_id)
    driver.must_plan(LANE)
    assert driver.plan(LANE) is None
    assert driver.must_plan(OTHER_LANE).step_id == 2
    driver.commit(7, lane_id=OTHER_LANE)
    assert driver.must_plan(OTHER_LANE).step_id == 3
    assert driver.outputs(2) == [7]


def test_placement_skips_a_lane_that_cannot_hold_the_request() -> None:
    """V3: too small a cache or context, or no rows; the request goes to the other lane although it is fuller."""
    driver = Driver.of(num_blocks=4)
    driver.reopen(OTHER_LANE, epoch=1)
    driver.add(1, 20)
    driver.plan(LANE)
    assert admitted(driver) == [(1, 1)]
    driver.add(2, 20)
    driver.plan(LANE)
    assert admitted(driver) == [(2, 1)]
    # Accepted while the larger lane was open: with only small ones left it waits rather than being fed past them.
    driver.lose(OTHER_LANE)
    driver.reopen(OTHER_LANE, epoch=2, max_model_len=8)
    assert driver.plan(LANE) is None
    assert admitted(driver) == []


def test_a_lane_that_comes_back_is_tried_even_if_all_looks_as_before() -> None:
    """O8: nobody found a place beside request 1; the same number of requests waits for an empty lane now."""
    driver = Driver.of(num_blocks=4, block_size=4)
    for key in (1, 2, 3):
        driver.add(key, 12, max_tokens=2)
    assert driver.must_plan().row_slots == (0,)
    driver.must_plan()
    driver.scheduler.lose_lane(LANE)
    driver.scheduler.abort(RequestKey(3))
    driver.scheduler.open_lane(LANE, make_lane_config(num_blocks=4, block_size=4), epoch=2)
    assert [event.key for event in driver.scheduler.plan(LANE).admitted] == [1]
