"""Forks: another choice of the same prompt shares it to the last position, with a copied tail block."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import RequestKey
from tests.scheduler.core.builders import LANE, Driver

PROMPT = tuple(range(1, 11))
"""Ten tokens in blocks of four: two full blocks and half a third."""


def forking(**fields: object) -> Driver:
    defaults = {"num_blocks": 16, "max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return Driver.of(policy={"prefix_caching": True}, **(defaults | fields))


def parent_with_a_token(driver: Driver, prompt: tuple[int, ...] = PROMPT) -> None:
    driver.add(1, prompt, max_tokens=8)
    driver.must_plan()
    driver.commit(90)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_fork_feeds_only_the_last_position(depth: int) -> None:
    """Protocol semantics 8: settled = prompt - 1, full blocks shared, the tail copied, one row of one token."""
    driver = forking(overlap_depth=depth)
    parent_with_a_token(driver)
    driver.add(2, PROMPT, max_tokens=8, fork_of=RequestKey(1))
    plan = driver.must_plan()
    (admission,) = plan.admissions
    parent = driver.sequence(1).stay
    assert parent is not None
    assert admission.num_settled_tokens == 9
    assert list(admission.block_ids[:2]) == parent.block_ids[:2]
    assert plan.copy_src_block_ids == (parent.block_ids[2],)
    assert plan.copy_dst_block_ids == (admission.block_ids[2],)
    assert (plan.row_starts, plan.row_counts, plan.row_samples) == ((9,), (1,), (True,))
    assert driver.outcome.admitted[0].num_cached_tokens == 9


def test_a_prompt_that_fills_its_blocks_needs_no_copy() -> None:
    """Nine tokens: the last position begins a block of its own."""
    driver = forking(overlap_depth=0)
    parent_with_a_token(driver, PROMPT[:9])
    driver.add(2, PROMPT[:9], max_tokens=8, fork_of=RequestKey(1))
    plan = driver.must_plan()
    assert (plan.copy_src_block_ids, plan.admissions[0].num_settled_tokens) == ((), 8)


@pytest.mark.parametrize(
    ("prompt", "salt", "fork_of"),
    [(PROMPT, "", 7), ((*PROMPT[:-1], 99), "", 1), (PROMPT, "other", 1)],
    ids=["no such parent", "another prompt", "another salt"],
)
def test_what_is_no_fork_is_admitted_as_usual(prompt: tuple[int, ...], salt: str, fork_of: int) -> None:
    """fork_of is a hint; it never shares what is not the same."""
    driver = forking(overlap_depth=0)
    parent_with_a_token(driver)
    driver.add(2, prompt, max_tokens=8, cache_salt=salt, fork_of=RequestKey(fork_of))
    plan = driver.must_plan()
    assert plan.copy_src_block_ids == ()
    assert plan.admissions[0].num_settled_tokens == (0 if salt else 8)


def test_a_copied_block_is_kept_until_the_copy_is_made() -> None:
    """E1: the parent is gone before the fork's first step; its tail comes back when that step has completed."""
    driver = forking(overlap_depth=0)
    parent_with_a_token(driver)
    driver.must_plan()
    driver.add(2, PROMPT, max_tokens=8, fork_of=RequestKey(1))
    assert driver.plan() is None, "the window is closed, but the fork is admitted"
    driver.scheduler.abort(RequestKey(1))
    driver.commit(91)
    (source,) = driver.must_plan().copy_src_block_ids
    pool = driver.scheduler.lanes[LANE].blocks
    assert source not in pool.free_ids()
    driver.commit(92)
    assert source in pool.free_ids()


def test_a_fork_of_a_fork_waits_for_the_copy() -> None:
    """H2: a tail that is still to be copied is no source; the second fork shares the full blocks only."""
    driver = forking(overlap_depth=0, max_num_seqs=4)
    parent_with_a_token(driver)
    driver.add(2, PROMPT, max_tokens=8, fork_of=RequestKey(1))
    driver.add(3, PROMPT, max_tokens=8, fork_of=RequestKey(2))
    plan = driver.must_plan()
    assert [each.num_settled_tokens for each in plan.admissions] == [9, 8]
    assert len(plan.copy_src_block_ids) == 1


def test_a_fork_that_is_aborted_before_its_first_step_returns_the_tail() -> None:
    """F4, E5: nothing of it was announced; the borrowed block goes back once."""
    driver = forking(max_num_batched_tokens=4)
    driver.add(1, PROMPT, max_tokens=8)
    for _ in range(3):
        driver.must_plan()
        driver.commit(*[90] * (driver.books[LANE].steps[0][0].row_samples[-1:] == (True,)))
    driver.add(3, tuple(range(50, 70)), max_tokens=2)
    driver.must_plan()
    driver.add(2, PROMPT, max_tokens=8, fork_of=RequestKey(1))
    driver.plan()
    stay = driver.sequence(2).stay
    assert stay is not None
    assert stay.copy_from is not None
    driver.scheduler.abort(RequestKey(2))
    driver.scheduler.abort(RequestKey(3))
    driver.scheduler.abort(RequestKey(1))
    while driver.books[LANE].steps:
        _, rows = driver.books[LANE].steps[0]
        driver.commit(*[91] * sum(row.samples for row in rows))
    pool = driver.scheduler.lanes[LANE].blocks
    assert (pool.num_owned, pool.num_quarantined) == (0, 0)
