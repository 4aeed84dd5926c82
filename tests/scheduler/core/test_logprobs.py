"""Log probabilities pass through the core with their tokens, and are trimmed like them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepahead.scheduler.core import QueueFull, RequestInfeasible, TokenLogprobs
from tests.scheduler.core.builders import EOS, LANE, Driver, make_request


def record(position: int, logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(
        first_position=position,
        token_logprobs=(logprob,),
        ranks=(1,),
        top_counts=(0,),
        top_token_ids=(),
        top_logprobs=(),
    )


def test_a_record_is_delivered_with_its_token_and_dropped_with_it() -> None:
    """J7, D3: the overrun row's record appears nowhere; requests that do not ask have none."""
    driver = Driver.of()
    driver.add(1, 4, stop_token_ids=frozenset({EOS}))
    driver.add(2, 4)
    driver.must_plan()
    driver.must_plan()
    for tokens, delivered in (((EOS, 20), [1]), ((30, 21), [])):
        result = driver.result(*tokens)
        first = result.incarnations[0]
        outcome = driver.scheduler.commit(LANE, replace(result, logprobs={first: record(4)}))
        driver.books[LANE].steps.popleft()
        assert list(outcome.logprobs) == delivered
        assert outcome.token_ids == [token for token in tokens if token != 30]


def test_records_of_a_prompt_are_delivered_chunk_by_chunk() -> None:
    """J8: also of chunks that sample nothing; the shell merges by position."""
    driver = Driver.of(max_num_batched_tokens=8)
    driver.add(1, 12, recompute_prompt=True)
    driver.must_plan()
    driver.must_plan()
    for tokens, position in (((), 1), ((10,), 9)):
        result = driver.result(*tokens)
        chunk = record(position)
        outcome = driver.scheduler.commit(LANE, replace(result, prompt_logprobs={result.incarnations[0]: chunk}))
        driver.books[LANE].steps.popleft()
        assert outcome.prompt_logprobs == {1: chunk}
        assert outcome.logprobs == {}


def test_a_prompt_whose_records_are_wanted_is_fed_whole() -> None:
    """H8: no hit, however much is cached; its own blocks are published as ever."""
    driver = Driver.of(policy={"prefix_caching": True})
    driver.add(1, 9, max_tokens=1)
    driver.must_plan()
    driver.commit(10)
    driver.add(2, 9, max_tokens=1, recompute_prompt=True)
    assert driver.must_plan().admissions[0].num_settled_tokens == 0
    driver.commit(10)
    driver.add(3, 9, max_tokens=1)
    assert driver.must_plan().admissions[0].num_settled_tokens == 8


def test_records_of_a_prompt_come_in_portions_that_others_can_wait_for() -> None:
    """Each position costs the worker a row of logits; a prompt behind it that asks for none takes what is left."""
    driver = Driver.of(policy={"max_described_tokens": 3}, overlap_depth=0)
    driver.add(1, 7, max_tokens=2, recompute_prompt=True)
    driver.add(2, 4, recompute_prompt=True)
    driver.add(3, 14, max_tokens=1)
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for tokens in ((), (10,), (11,), (12, 13)):
        plan = driver.must_plan()
        rows.append((plan.row_slots, plan.row_counts))
        driver.commit(*tokens)
    assert rows == [
        ((0, 2), (3, 13)),
        ((0, 2), (3, 1)),
        ((0, 1), (1, 2)),
        ((1,), (2,)),
    ]


def test_a_group_is_accepted_whole_or_not_at_all() -> None:
    """D8: choices of one request wait together; a refusal leaves nothing behind."""
    driver = Driver.of(policy={"max_waiting": 3})
    driver.add(1)
    with pytest.raises(QueueFull):
        driver.scheduler.add_requests([make_request(key) for key in (2, 3, 4)])
    with pytest.raises(RequestInfeasible):
        driver.scheduler.add_requests([make_request(2), make_request(3, 32)])
    assert list(driver.scheduler.sequences) == [1]
    driver.scheduler.add_requests([make_request(key) for key in (2, 3)])
    assert list(driver.scheduler.sequences) == [1, 2, 3]
