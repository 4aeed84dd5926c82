"""Who goes first: strict priority with ageing, fair shares, the bounded queue, and who gives way."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import Ordering, Preempted, QueueFull, RequestKey
from stepahead.scheduler.core.fair_share import OUTPUT_WEIGHT
from tests.scheduler.core.builders import LANE, Driver


def ordered(ordering: Ordering, *, max_num_seqs: int = 1, **policy: object) -> Driver:
    """One place per step, no overlap, so that admissions come one after another."""
    return Driver.of(
        overlap_depth=0,
        max_num_seqs=max_num_seqs,
        num_slots=max_num_seqs,
        num_blocks=64,
        max_model_len=64,
        policy={"ordering": ordering} | policy,
    )


def admissions(driver: Driver, count: int) -> list[int]:
    """Plays steps until `count` requests have been admitted; returns their keys in order."""
    keys: list[int] = []
    while len(keys) < count:
        plan = driver.plan()
        keys += [each.key for each in driver.outcome.admitted]
        if plan is not None:
            _, rows = driver.books[LANE].steps[0]
            driver.commit(*[9] * sum(row.samples for row in rows))
    return keys


def test_the_higher_priority_goes_first_and_equals_by_arrival() -> None:
    """Strict priority: 1 before 0 before -1, first come first served within a level."""
    driver = ordered(Ordering.PRIORITY)
    for key, priority in [(1, 0), (2, -1), (3, 1), (4, 0), (5, 1)]:
        driver.add(key, 4, max_tokens=1, priority=priority)
    assert admissions(driver, 5) == [3, 5, 1, 4, 2]


def test_waiting_promotes() -> None:
    """Ageing: after every two admissions of others a request counts one level more, so nobody starves."""
    driver = ordered(Ordering.PRIORITY, ageing_admissions=2)
    driver.add(1, 4, max_tokens=1, priority=0)
    order: list[int] = []
    for key in range(2, 9):
        driver.add(key, 4, max_tokens=1, priority=2)
        order += admissions(driver, 1)
    # Four admissions of others make level 0 equal to a newcomer of level 2, and then the older one wins.
    assert order.index(1) == 4


def test_priorities_are_a_policy() -> None:
    """First come, first served ignores them: a field without its policy must not change anything."""
    driver = ordered(Ordering.FCFS)
    for key, priority in [(1, 0), (2, 5)]:
        driver.add(key, 4, max_tokens=1, priority=priority)
    assert admissions(driver, 2) == [1, 2]


def test_the_lowest_priority_gives_way_first() -> None:
    """G6, BL-25: memory is short; the victim is the youngest of the lowest priority, not the youngest."""
    driver = Driver.of(
        overlap_depth=0,
        num_blocks=4,
        max_model_len=16,
        max_num_seqs=3,
        policy={"ordering": Ordering.PRIORITY},
    )
    driver.add(1, 3, max_tokens=8, priority=0)
    driver.add(2, 3, max_tokens=8, priority=-1)
    driver.add(3, 3, max_tokens=8, priority=0)
    driver.must_plan()
    driver.commit(10, 20, 30)
    driver.must_plan()
    driver.commit(11, 21, 31)
    driver.must_plan()
    assert driver.outcome.preempted == (Preempted(RequestKey(2)),)


def test_the_tenant_that_was_served_least_goes_first() -> None:
    """Fair share: a tenant with one long prompt waits until the other's short ones have had as much."""
    driver = ordered(Ordering.FAIR)
    for key in (1, 2):
        driver.add(key, 12, max_tokens=1, tenant="long")
    for key in (11, 12, 13, 14):
        driver.add(key, 4, max_tokens=1, tenant="short")
    assert admissions(driver, 6) == [1, 11, 12, 13, 2, 14]


def test_backlogged_tenants_get_equal_service_within_a_bound() -> None:
    """P8: with work always waiting, counters differ by no more than what is admitted at once."""
    driver = ordered(Ordering.FAIR, max_num_seqs=2)
    key = 0
    for _ in range(40):
        for tenant, prompt, tokens in (("a", 9, 1), ("b", 2, 5), ("c", 3, 2)):
            key += 1
            driver.add(key, prompt, max_tokens=tokens, tenant=tenant)
    shares = driver.scheduler.shares
    largest = 2 * (9 + OUTPUT_WEIGHT * 5)
    while len({seq.request.tenant for seq in driver.scheduler.waiting}) == 3:
        admissions(driver, 1)
        served = [shares.served(tenant) for tenant in "abc"]
        assert max(served) - min(served) <= largest, served


def test_staying_away_saves_nothing() -> None:
    """A tenant that returns starts level with those who are active, and they do not wait for it to catch up."""
    driver = ordered(Ordering.FAIR)
    driver.add(1, 4, max_tokens=1, tenant="guest")
    assert admissions(driver, 1) == [1]
    for key in range(2, 8):
        driver.add(key, 8, max_tokens=1, tenant="regular")
    assert admissions(driver, 3) == [2, 3, 4]
    for key in range(11, 15):
        driver.add(key, 8, max_tokens=1, tenant="guest")
    assert sorted(admissions(driver, 2)) != [11, 12], "they take turns"


def test_the_queue_is_bounded_for_newcomers() -> None:
    """A full queue refuses; nothing of the refused request stays."""
    driver = ordered(Ordering.FCFS, max_waiting=2)
    for key in (1, 2):
        driver.add(key, 4)
    with pytest.raises(QueueFull) as caught:
        driver.add(3, 4)
    assert caught.value.num_waiting == 2
    assert RequestKey(3) not in driver.scheduler.sequences


@pytest.mark.parametrize("fields", [{"ageing_admissions": 0}, {"max_waiting": 0}, {"max_held_steps": -1}])
def test_limits_are_validated(fields: dict[str, int]) -> None:
    """Config is wrong at the edge or not at all."""
    with pytest.raises(ValueError, match=next(iter(fields))):
        Driver.of(policy=fields)
