"""The prefix cache: keys, visibility, eviction, holds, counts (rules H1-H9)."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import BlockId, LaneId, RequestKey, RowFault, placement, scheduler
from stepahead.scheduler.core.block_pool import BlockPool
from stepahead.scheduler.core.ids import BlockKey
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.placement import Place
from stepahead.scheduler.core.prefix_cache import KeyChain
from stepahead.scheduler.core.sequence import Sequence
from tests.scheduler.core.builders import LANE, OTHER_LANE, Driver

CACHE = {"prefix_caching": True}


def cached_driver(**fields: object) -> Driver:
    """One lane with blocks of four tokens, no overlap, caching on."""
    policy = CACHE | dict(fields.pop("policy", {}))  # type: ignore[call-overload]
    defaults = {"overlap_depth": 0, "num_blocks": 16, "max_model_len": 32, "max_num_seqs": 4}
    return Driver.of(policy=policy, **(defaults | fields))


def add(driver: Driver, key: int, prompt: list[int], **fields: object) -> None:
    driver.add(key, tuple(prompt), **({"max_tokens": 2} | fields))


def run_alone(driver: Driver, key: int, prompt: list[int], **fields: object) -> int:
    """Runs a request to its end; returns its cached tokens."""
    add(driver, key, prompt, **fields)
    driver.must_plan()
    (admitted,) = driver.outcome.admitted
    while not driver.scheduler.is_idle:
        driver.commit(*[50 + key] * sum(row.samples for row in driver.books[LANE].steps[0][1]))
        driver.plan()
    return admitted.num_cached_tokens


def test_keys_are_chained_and_separate_salts_models_and_sizes() -> None:
    """H4, H6: a key covers its tokens, all before them, the salt, the model and the block size."""

    def keys(history: list[int], *, size: int = 2, model: str = "m", salt: str = "") -> list[BlockKey]:
        return list(KeyChain(history, block_size=size, model=model, salt=salt).first(len(history) // size))

    base = keys([1, 2, 3, 4])
    assert keys([1, 2, 3, 4]) == base
    assert keys([1, 2, 3, 5])[0] == base[0]
    assert keys([9, 2, 3, 4])[1] != base[1], "the second block depends on the first"
    others = [
        keys([1, 2, 3, 4], salt="x"),
        keys([1, 2, 3, 4], model="n"),
        keys([1, 2, 3, 4], model="", salt="m"),
        keys([1, 2, 3, 4, 0, 0, 0, 0], size=4),
    ]
    assert len({key for chain in [base, *others] for key in chain[:2]}) == 2 * len([base, *others])


def test_a_second_request_hits_what_the_first_has_settled() -> None:
    """H2, H9: prompt and answer blocks are shared; the hit is counted once, at the admission that used it."""
    driver = cached_driver()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert run_alone(driver, 1, prompt) == 0
    assert run_alone(driver, 2, prompt) == 8
    assert driver.scheduler.totals.cached_tokens == 8
    # The answer's first token and the prompt's last fill no block; a conversation that goes on hits the prompt.
    assert run_alone(driver, 3, [*prompt, 51, 60, 61]) == 8


def test_a_full_hit_leaves_the_last_block_to_compute() -> None:
    """H5: a prompt of exactly two cached blocks shares one and computes the other in a block of its own."""
    driver = cached_driver()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    run_alone(driver, 1, prompt)
    add(driver, 2, prompt)
    plan = driver.must_plan()
    (admission,) = plan.admissions
    assert admission.num_settled_tokens == 4
    assert (plan.row_starts, plan.row_counts) == ((4,), (4,))
    pool = driver.scheduler.lanes[LANE].blocks
    assert pool.state_of(admission.block_ids[0]) == (1, 0)
    assert admission.block_ids[1] not in pool.find([*driver.sequence(2).block_keys(2, 4, "")])


def test_salts_never_share() -> None:
    """H4, BL-26: the same prompt under another salt is computed again."""
    driver = cached_driver()
    prompt = list(range(1, 10))
    assert run_alone(driver, 1, prompt, cache_salt="a") == 0
    assert run_alone(driver, 2, prompt, cache_salt="b") == 0
    assert run_alone(driver, 3, prompt, cache_salt="a") == 8


def test_two_live_requests_share_one_block() -> None:
    """E4: a block with two owners is owned once, and comes back when both have let go."""
    driver = cached_driver(max_num_batched_tokens=16)
    prompt = list(range(1, 10))
    add(driver, 1, prompt, max_tokens=8)
    driver.must_plan()
    driver.commit(90)
    add(driver, 2, prompt, max_tokens=8)
    driver.must_plan()
    pool = driver.scheduler.lanes[LANE].blocks
    first, second = driver.sequence(1).stay, driver.sequence(2).stay
    assert first is not None
    assert second is not None
    assert first.block_ids[:2] == second.block_ids[:2]
    assert [pool.state_of(block_id) for block_id in first.block_ids[:2]] == [(2, 0), (2, 0)]
    assert pool.num_owned == len({*first.block_ids, *second.block_ids})
    driver.scheduler.abort(RequestKey(1))
    assert [pool.state_of(block_id)[0] for block_id in second.block_ids[:2]] == [1, 1]


def test_a_request_is_held_while_its_prefix_is_being_prefilled() -> None:
    """Protocol semantics 8: it starts one step later and finds everything, instead of computing it too."""
    driver = cached_driver(max_num_batched_tokens=64)
    prompt = list(range(1, 18))
    add(driver, 1, prompt)
    add(driver, 2, prompt)
    plan = driver.must_plan()
    assert [each.key for each in driver.outcome.admitted] == [1]
    assert plan.total_tokens == 17
    driver.commit(90)
    driver.must_plan()
    (admitted,) = driver.outcome.admitted
    assert (admitted.key, admitted.num_cached_tokens) == (2, 16)


def test_a_hold_is_bounded_in_steps() -> None:
    """Protocol semantics 8: a prefix that is slow in coming is not waited for longer than max_held_steps."""
    driver = cached_driver(
        policy={"max_held_steps": 3}, max_num_batched_tokens=4, num_blocks=40, max_model_len=64, num_slots=4
    )
    prompt = list(range(1, 42))
    add(driver, 1, prompt)
    add(driver, 2, prompt)
    steps = 0
    while not any(each.key == 2 for each in driver.outcome.admitted):
        driver.must_plan()
        driver.commit()
        steps += 1
    assert steps == 4


def test_who_is_still_held_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds may wait for one prefix: a pass looks for places for newcomers only."""
    searched: list[int] = []

    def find_and_note(sequence: Sequence, lanes: list[Lane], parent: Sequence | None) -> Place | None:
        searched.append(sequence.request.key)
        return placement.find_place(sequence, lanes, parent)

    monkeypatch.setattr(scheduler, "find_place", find_and_note)
    driver = cached_driver(max_num_batched_tokens=8, max_num_seqs=8, num_blocks=99, max_model_len=64)
    prompt = list(range(1, 42))
    for key in range(1, 7):
        add(driver, key, prompt)
    driver.must_plan()
    assert searched == [1, 2, 3, 4, 5, 6]
    add(driver, 7, prompt)
    add(driver, 8, [77])
    driver.plan()
    assert [each.key for each in driver.outcome.admitted] == [8]
    assert searched[6:] == [7, 8]
    driver.commit()
    driver.must_plan()
    assert searched[8:] == [2, 3, 4, 5, 6, 7], "the block they waited for is there: now they wait for the next"
    assert driver.outcome.admitted == ()


@pytest.mark.parametrize("fault", ["abort", "lose"])
def test_a_hold_ends_with_whoever_was_waited_for(fault: str) -> None:
    driver = cached_driver(max_num_batched_tokens=8, num_lanes=2, num_blocks=99, max_model_len=64)
    for key in (1, 2, 3):
        add(driver, key, list(range(1, 42)))
    driver.must_plan()
    assert [(each.key, each.lane_id) for each in driver.outcome.admitted] == [(1, LANE), (2, OTHER_LANE)]
    hold = driver.sequence(3).hold
    assert hold is not None
    assert hold.lane_id == LANE
    if fault == "abort":
        driver.scheduler.abort(RequestKey(1))
        driver.plan(OTHER_LANE)
        assert [(each.key, each.lane_id) for each in driver.outcome.admitted] == [(3, LANE)]
    else:
        driver.lose()
        driver.plan(OTHER_LANE)
        hold = driver.sequence(3).hold
        assert hold is not None
        assert hold.lane_id == OTHER_LANE, "there the same prefix is on its way"


def test_a_faulty_row_leaves_nothing_behind() -> None:
    """J10, H3, BL-32: non-finite logits: what the request wrote is not cached, sent again it starts clean."""
    driver = cached_driver(max_num_batched_tokens=4)
    prompt = list(range(1, 10))
    add(driver, 1, prompt)
    driver.must_plan()
    driver.commit()
    driver.must_plan()
    driver.commit()
    driver.must_plan()
    (finished,) = driver.commit(empty=[0], faults={0: RowFault.NON_FINITE}).finished
    assert finished.fault is RowFault.NON_FINITE
    pool = driver.scheduler.lanes[LANE].blocks
    assert (pool.num_idle, pool.num_free) == (0, pool.num_total)
    assert run_alone(driver, 2, prompt) == 0


def test_the_longest_unused_content_is_evicted_tail_first() -> None:
    """E12: LRU over requests, and within one the last block goes first."""
    driver = cached_driver(num_blocks=6, max_model_len=24)
    run_alone(driver, 1, list(range(1, 10)))
    run_alone(driver, 2, list(range(101, 110)))
    pool = driver.scheduler.lanes[LANE].blocks
    assert pool.num_idle == 4
    taken = pool.take(pool.num_free + 1)
    assert taken is not None
    assert pool.num_evictions == 1
    assert len(pool.find(driver_keys(list(range(1, 10)), 2))) == 1, "the head of the older one is still there"
    assert len(pool.find(driver_keys(list(range(101, 110)), 2))) == 2


def driver_keys(history: list[int], num_blocks: int) -> list[BlockKey]:
    return list(KeyChain(history, block_size=4, model="", salt="").first(num_blocks))


def test_placement_prefers_the_lane_that_knows_the_prefix() -> None:
    """Admission picks a lane by prefix hit, then by free capacity."""
    driver = cached_driver(num_lanes=2)
    prompt = list(range(1, 10))
    add(driver, 1, prompt, max_tokens=1)
    driver.plan(LaneId(0))
    first = driver.outcome.admitted[0].lane_id
    driver.plan(first)
    driver.commit(90, lane_id=first)
    # The other lane is as empty as this one; the hit decides.
    add(driver, 2, prompt, max_tokens=1)
    driver.plan(LaneId(1 - first))
    (admitted,) = driver.outcome.admitted
    assert (admitted.lane_id, admitted.num_cached_tokens) == (first, 8)


def test_a_pool_never_gives_out_a_shared_block() -> None:
    """Sharing an idle block takes it out of what `take` may evict."""
    pool = BlockPool(2)
    taken = pool.take(2)
    assert taken == [0, 1]
    pool.publish(BlockId(0), BlockKey(b"k"))
    pool.quarantine(taken)
    pool.release(taken)
    assert (pool.num_idle, pool.num_free, pool.num_available) == (1, 1, 2)
    pool.share(pool.find([BlockKey(b"k")]))
    assert pool.take(2) is None
    assert pool.take(1) == [1]


def test_a_quarantined_block_may_be_shared() -> None:
    """A full settled block is written by nobody, so an old owner's rows in flight do not matter."""
    pool = BlockPool(1)
    pool.take(1)
    pool.publish(BlockId(0), BlockKey(b"k"))
    pool.quarantine([BlockId(0)])
    assert pool.num_quarantined == 1
    pool.share([BlockId(0)])
    assert (pool.num_quarantined, pool.num_owned) == (0, 1)
    pool.release([BlockId(0)])
    assert (pool.num_quarantined, pool.num_owned, pool.num_idle) == (0, 1, 0)


def test_a_lost_lane_takes_its_cache_along() -> None:
    """O2: cached blocks of an old epoch are void."""
    driver = cached_driver()
    prompt = list(range(1, 10))
    run_alone(driver, 1, prompt)
    driver.scheduler.lose_lane(LANE)
    driver.reopen(num_blocks=16, max_model_len=32)
    assert run_alone(driver, 2, prompt) == 0


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_without_caching_nothing_is_kept(max_tokens: int) -> None:
    """The policy can be switched off: then every block is free again at rest."""
    driver = cached_driver(policy={"prefix_caching": False})
    for key in (1, 2):
        assert run_alone(driver, key, list(range(1, 10)), max_tokens=max_tokens) == 0
    pool = driver.scheduler.lanes[LANE].blocks
    assert (pool.num_free, pool.num_idle) == (pool.num_total, 0)
