"""Replays of window groups alone: when, from where, what is published behind them (rules N5 to N10, N13, N14)."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import RowFault, StepPlan, WindowPool
from stepahead.scheduler.core.window_replay import Replay
from tests.scheduler.core.builders import LANE, Driver, make_lane_config, make_request
from tests.scheduler.core.test_windows import run_to_the_end

PROMPT = tuple(range(100, 120))
SIZES = {"block_size": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "replays_windows": True}


def windowed(window: int = 4, pool: int = 12, layers: int = 1, **options: object) -> Driver:
    """A lane whose layers all see a window: blocks of 2, depth 1, 8 tokens a step."""
    return Driver.of(**(windowed_sizes(window, pool, layers) | options))


def windowed_sizes(window: int = 4, pool: int = 12, layers: int = 1) -> dict[str, object]:
    windows = (WindowPool(window=window, num_blocks=pool, num_layers=layers),)
    return SIZES | {"num_blocks": 0, "windows": windows}


def mixed(window: int = 4, pool: int = 6, layers: int = 1, **options: object) -> Driver:
    """As `windowed`, with layers that see everything beside them, and a prefix cache."""
    policy = {"policy": {"prefix_caching": True}}
    return Driver.of(**(windowed_sizes(window, pool, layers) | {"num_blocks": 40} | policy | options))


def run_until(driver: Driver, num_outputs: int) -> None:
    """Commits steps until request 1 has so many outputs."""
    while len(driver.outputs(1)) < num_outputs:
        while driver.plan() is not None:
            pass
        plan, rows = driver.books[LANE].steps[0]
        driver.commit(*[50 + plan.step_id for row in rows if row.samples])


def forget_windows(driver: Driver) -> None:
    """Another request takes every block of the window pool."""
    driver.add(90, tuple(range(300, 330)), max_tokens=1)
    run_to_the_end(driver)


def rows_of(plan: StepPlan) -> list[tuple[int, int, bool]]:
    return list(zip(plan.row_starts, plan.row_counts, plan.row_samples, strict=True))


# ------------------------------------------------------------------------------------------------ how many


@pytest.mark.parametrize("window", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_n8_exact_states_take_a_window_less_one_for_each_layer(window: int, layers: int) -> None:
    """By brute force: which positions decide what the layers' queries at E see."""
    reached = {100}
    for _ in range(layers):
        reached = {position - back for position in reached for back in range(window)}
    config = make_lane_config(**windowed_sizes(window, 12, layers))
    assert config.exact_replay_tokens == 100 - min(reached)
    assert config.largest_window == window


def test_n8_layers_of_several_windows_add_up() -> None:
    pools = (WindowPool(window=3, num_blocks=9, num_layers=4), WindowPool(window=6, num_blocks=9, num_layers=2))
    assert make_lane_config(windows=pools).exact_replay_tokens == 4 * 2 + 2 * 5
    replay = Replay(10, 28, 18)
    assert (replay.is_exact, Replay(12, 28, 18).is_exact) == (True, False)
    # Behind the other layers' sums: 28 - (W - 1), where the window of the first row behind it begins.
    assert [replay.first_exact(window) for window in (3, 6)] == [26, 23]


# ------------------------------------------------------------------------------------------------ windows alone


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_n5_n14_after_a_loss_the_last_windows_are_fed_again_and_then_the_last_output(depth: int) -> None:
    """Three layers of a window of 4: nine positions, from the first of a block on. The last row alone samples."""
    driver = windowed(layers=3, overlap_depth=depth, num_slots=12)
    driver.add(1, PROMPT, max_tokens=9)
    run_until(driver, 4)
    outputs = driver.outputs(1)
    driver.lose()
    driver.reopen(**windowed_sizes(layers=3))
    plan = driver.must_plan()
    (admission,) = plan.admissions
    assert admission.token_ids == (*PROMPT, *outputs)
    assert (admission.num_settled_tokens, admission.replay_start, admission.null_counts) == (23, 14, (7,))
    assert rows_of(plan) == [(14, 8, False)]
    (admitted,) = driver.outcome.admitted
    assert (admitted.replays, admitted.approximate_from, admitted.num_cached_tokens) == (True, None, 0)
    if not depth:
        driver.commit()
    assert rows_of(driver.must_plan()) == [(22, 1, False)]
    while not (plan := driver.plan()):
        driver.commit()
    assert rows_of(plan) == [(23, 1, True)]
    assert len(run_to_the_end(driver)[1]) == 5
    assert driver.scheduler.totals.window_replays == 1


def test_n10_a_history_that_is_no_longer_than_the_replay_is_fed_whole() -> None:
    """Nine positions and a block's rest: up to 10 settled positions nothing is spared."""
    replays: list[bool] = []
    for prompt in (10, 11, 12):
        driver = windowed(layers=3)
        driver.add(1, prompt, max_tokens=9)
        run_until(driver, 1)
        driver.lose()
        driver.reopen(**windowed_sizes(layers=3))
        (admission,) = driver.must_plan().admissions
        replays.append(admission.replay_start is not None)
        run_to_the_end(driver)
    assert replays == [False, True, True]


def test_a_prompt_is_fed_whole_the_first_time_and_as_far_as_it_had_come_spared_the_second() -> None:
    """A loss in the middle of the prompt: 16 positions had settled, so the replay ends there."""
    driver = windowed()
    driver.add(1, PROMPT, max_tokens=2)
    plans = [driver.must_plan(), driver.must_plan()]
    assert [rows_of(plan)[0] for plan in plans] == [(0, 8, False), (8, 8, False)]
    driver.commit()
    driver.commit()
    driver.lose()
    driver.reopen(**windowed_sizes())
    plan = driver.must_plan()
    assert (plan.admissions[0].num_settled_tokens, plan.admissions[0].replay_start) == (16, 12)
    assert rows_of(plan) == [(12, 4, False)]
    assert rows_of(driver.must_plan()) == [(16, 4, True)]
    run_to_the_end(driver)


def test_a_preempted_sequence_comes_back_with_a_replay() -> None:
    """The older one grows until its window is full, and a younger one that is long already gives way."""
    driver = windowed(12, 11)
    driver.add(1, 4, max_tokens=20)
    driver.add(2, tuple(range(200, 230)), max_tokens=20)
    assert {key: len(tokens) for key, tokens in run_to_the_end(driver).items()} == {1: 20, 2: 20}
    totals = driver.scheduler.totals
    assert totals.preemptions == totals.window_replays == 1
    assert totals.approximate_replays == totals.cached_tokens == 0


@pytest.mark.parametrize("windows", [(1,), (1, 2)])
def test_the_narrowest_windows_replay_a_block(windows: tuple[int, ...]) -> None:
    """A window of 1 takes nothing at all: a block is replayed all the same, so that rows say where it is."""
    sizes = SIZES | {"num_blocks": 0, "windows": tuple(WindowPool(window=w, num_blocks=9) for w in windows)}
    driver = Driver.of(**sizes)
    driver.add(1, 9, max_tokens=4)
    run_until(driver, 1)
    driver.lose()
    driver.reopen(**sizes)
    (admission,) = driver.must_plan().admissions
    assert (admission.num_settled_tokens, admission.replay_start) == (9, 8)
    run_to_the_end(driver)


@pytest.mark.parametrize("sizes", [windowed_sizes() | {"replays_windows": False}, SIZES | {"num_blocks": 16}])
def test_a_worker_that_cannot_and_one_without_windows_are_fed_everything(sizes: dict[str, object]) -> None:
    driver = Driver.of(**sizes)
    driver.add(1, PROMPT, max_tokens=4, approximate_replay_tokens=4)
    run_until(driver, 1)
    driver.lose()
    driver.reopen(**sizes)
    (admission,) = driver.must_plan().admissions
    assert (admission.num_settled_tokens, admission.replay_start) == (0, None)
    run_to_the_end(driver)


def test_a_failed_step_of_a_replay_is_fed_again() -> None:
    driver = windowed(layers=3)
    driver.add(1, PROMPT, max_tokens=4)
    run_until(driver, 1)
    driver.lose()
    driver.reopen(**windowed_sizes(layers=3))
    assert rows_of(driver.must_plan()) == [(10, 8, False)]
    assert rows_of(driver.must_plan()) == [(18, 2, False)]
    driver.fail()
    driver.fail()
    assert rows_of(driver.must_plan()) == [(10, 8, False)]
    run_to_the_end(driver)


# ------------------------------------------------------------------------------------------------ mixed layers


def test_n6_n12_a_hit_whose_window_is_gone_replays_the_window_alone() -> None:
    """The full layers know all 20 positions. Six blocks of theirs stay shared, nothing is written there."""
    driver = mixed()
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    forget_windows(driver)
    keys = make_keys(driver, 10)
    driver.add(2, (*PROMPT, 7), max_tokens=2)
    plan = driver.must_plan()
    (admission,) = plan.admissions
    assert (admission.num_settled_tokens, admission.replay_start) == (20, 16)
    assert admission.block_counts == (11, 2)
    assert admission.null_counts == (0, 8)
    assert list(admission.block_ids[:10]) == driver.scheduler.lanes[LANE].blocks.find(keys)
    assert rows_of(plan) == [(16, 4, False)]
    (admitted,) = driver.outcome.admitted
    assert (admitted.replays, admitted.num_cached_tokens) == (True, 16)
    assert rows_of(driver.must_plan()) == [(20, 1, True)]
    run_to_the_end(driver)


def make_keys(driver: Driver, num_blocks: int) -> list[bytes]:
    """Keys of the first blocks of PROMPT."""
    driver.add(80, PROMPT, max_tokens=1)
    keys = driver.sequence(80).block_keys(num_blocks, 2, "")
    driver.scheduler.abort(driver.sequence(80).request.key)
    return list(keys)


@pytest.mark.parametrize(("length", "start"), [(18, None), (19, None), (20, 2), (21, 2), (22, 4), (30, 12)])
def test_n10_a_hit_no_longer_than_the_replay_is_not_taken(length: int, start: int | None) -> None:
    """Six layers of a window of 4 take 18 positions and what is missing to a whole block."""
    prompt = tuple(range(100, 100 + length))
    driver = mixed(layers=6)
    driver.add(1, prompt, max_tokens=1)
    run_to_the_end(driver)
    forget_windows(driver)
    driver.add(2, (*prompt, 7), max_tokens=1)
    (admission,) = driver.must_plan().admissions
    found = 0 if start is None else length // 2 * 2
    assert (admission.num_settled_tokens, admission.replay_start) == (found, start)
    run_to_the_end(driver)


def test_n10_a_hit_that_finds_its_windows_is_better_than_a_replay() -> None:
    driver = mixed(pool=20)
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    driver.add(2, (*PROMPT, 7), max_tokens=1, approximate_replay_tokens=3)
    (admission,) = driver.must_plan().admissions
    assert (admission.num_settled_tokens, admission.replay_start) == (20, None)
    run_to_the_end(driver)


def test_n8_a_prompt_that_is_to_be_described_is_fed_whole() -> None:
    driver = mixed()
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    forget_windows(driver)
    driver.add(2, (*PROMPT, 7), max_tokens=1, recompute_prompt=True)
    (admission,) = driver.must_plan().admissions
    assert (admission.num_settled_tokens, admission.replay_start) == (0, None)
    with pytest.raises(ValueError, match="approximate_replay_tokens and recompute_prompt contradict"):
        make_request(3, recompute_prompt=True, approximate_replay_tokens=3)
    with pytest.raises(ValueError, match="approximate_replay_tokens must be 0 or more"):
        make_request(3, approximate_replay_tokens=-1)


# ------------------------------------------------------------------------------------------------ publishing


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_n9_behind_an_exact_replay_only_blocks_of_exact_states_are_published(layers: int) -> None:
    """A window of 4: states from E - 3 (less what rounding adds) on are exact in every layer, not earlier ones."""
    driver = mixed(layers=layers, pool=16, max_num_batched_tokens=16)
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    forget_windows(driver)
    keys = make_keys(driver, 10)
    driver.add(2, (*PROMPT, *range(70, 80)), max_tokens=1)
    plan = driver.must_plan()
    start = plan.admissions[0].replay_start
    assert start == (20 - 3 * layers) // 2 * 2
    run_to_the_end(driver)
    windows = driver.scheduler.lanes[LANE].windows
    assert windows is not None
    known = [windows.groups[0].pool.get(key) is not None for key in keys]
    first = -(-(start + 3 * (layers - 1)) // 2)
    assert known == [False] * first + [True] * (10 - first)


def test_n9_behind_an_exact_replay_of_three_layers() -> None:
    """As above, for the mutation check."""
    test_n9_behind_an_exact_replay_only_blocks_of_exact_states_are_published(3)


def test_n9_behind_an_approximate_replay_nothing_is_published() -> None:
    """Four positions where 18 would be exact. Neither group learns a key, and the next one replays as well."""
    driver = mixed(layers=6, pool=12)
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    forget_windows(driver)
    longer = (*PROMPT, 7, 8, 9, 10)
    driver.add(2, longer, max_tokens=6, approximate_replay_tokens=3)
    plan = driver.must_plan()
    assert (plan.admissions[0].num_settled_tokens, plan.admissions[0].replay_start) == (20, 16)
    (admitted,) = driver.outcome.admitted
    assert (admitted.replays, admitted.approximate_from) == (True, 0)
    run_to_the_end(driver)
    lane = driver.scheduler.lanes[LANE]
    assert lane.windows is not None
    driver.add(3, longer, max_tokens=1)
    keys = driver.sequence(3).block_keys(12, 2, "")
    assert len(lane.blocks.find(keys)) == 10
    assert [lane.windows.groups[0].pool.get(key) for key in keys] == [None] * 12
    assert driver.scheduler.totals.approximate_replays == 1
    run_to_the_end(driver)


def test_n9_nobody_waits_for_what_an_approximate_replay_will_not_publish() -> None:
    driver = mixed(layers=6, pool=16)
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    forget_windows(driver)
    longer = tuple(range(100, 130))
    driver.add(2, longer, max_tokens=1, approximate_replay_tokens=3)
    driver.must_plan()
    assert not driver.scheduler.lanes[LANE].being_prefilled
    run_to_the_end(driver)


def test_h3_a_fault_behind_a_replay_makes_the_replayed_blocks_unknown() -> None:
    driver = mixed(layers=1)
    driver.add(1, PROMPT, max_tokens=1)
    run_to_the_end(driver)
    forget_windows(driver)
    keys = make_keys(driver, 10)
    driver.add(2, (*PROMPT, 7, 8), max_tokens=4)
    driver.must_plan()
    driver.must_plan()
    driver.commit()
    slot = driver.must_plan().joined_slots[0]
    driver.commit(empty=(), faults={slot: RowFault.NON_FINITE})
    driver.commit(faults={slot: RowFault.POSITION_MISMATCH})
    windows = driver.scheduler.lanes[LANE].windows
    assert windows is not None
    assert [windows.groups[0].pool.get(key) for key in keys] == [None] * 10
    run_to_the_end(driver)


# ------------------------------------------------------------------------------------------------ approximate


@pytest.mark.parametrize(
    ("asked", "start", "is_exact"), [(0, 4, True), (2, 4, True), (3, 20, False), (4, 18, False), (17, 6, False)]
)
def test_n8_a_request_that_asks_for_less_than_exact_gets_it_in_whole_blocks(
    asked: int, start: int, is_exact: bool
) -> None:
    """23 positions settled, 18 would be exact (from 4 on); less than a window is none of a request's choices."""
    driver = windowed(layers=6)
    driver.add(1, PROMPT, max_tokens=9, approximate_replay_tokens=asked)
    run_until(driver, 4)
    driver.lose()
    driver.reopen(**windowed_sizes(layers=6))
    (admission,) = driver.must_plan().admissions
    assert (admission.num_settled_tokens, admission.replay_start) == (23, start)
    (admitted,) = driver.outcome.admitted
    assert admitted.approximate_from == (None if is_exact else 4)
    run_to_the_end(driver)


def test_n8_a_replay_that_rounding_makes_long_enough_is_exact() -> None:
    """Three layers take 9 positions; 8 were asked for, and the block begins one earlier."""
    driver = windowed(layers=3)
    driver.add(1, PROMPT, max_tokens=9, approximate_replay_tokens=8)
    run_until(driver, 4)
    driver.lose()
    driver.reopen(**windowed_sizes(layers=3))
    assert driver.must_plan().admissions[0].replay_start == 14
    assert driver.outcome.admitted[0].approximate_from is None
    run_to_the_end(driver)
