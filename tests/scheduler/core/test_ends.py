"""How requests end: stop ids, limits, their precedence, stop strings, deadlines, whole batches at once."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import Finished, FinishReason, Request, RequestKey
from tests.scheduler.core.builders import EOS, LANE, Driver, make_request

STOPS = frozenset({EOS})


def run_solo(
    tokens: list[int], *, depth: int = 1, max_tokens: int = 50, **fields: object
) -> tuple[list[int], Finished]:
    """One request whose worker samples `tokens` in order; returns what was delivered and the end."""
    driver = Driver.of(overlap_depth=depth)
    driver.add(1, 3, max_tokens=max_tokens, **fields)
    supply = iter([*tokens, *([77] * 60)])
    delivered: list[int] = []
    while True:
        if driver.plan() is not None:
            continue
        outcome = driver.commit(next(supply))
        delivered += outcome.token_ids
        if outcome.finished:
            (finished,) = outcome.finished
            while driver.books[LANE].steps:
                late = driver.commit(next(supply))
                assert (late.token_ids, late.finished, late.num_overrun_rows) == ([], [], 1)
            assert driver.scheduler.is_idle
            return delivered, finished


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stop_id_ends_with_at_most_depth_overrun_rows(depth: int) -> None:
    """D1, D3: the rows behind an unpredictable end are counted and exposed nowhere."""
    driver = Driver.of(overlap_depth=depth)
    driver.add(1, 3, max_tokens=20, stop_token_ids=STOPS)
    for _ in range(depth + 1):
        driver.must_plan()
    outcome = driver.commit(EOS)
    assert outcome.token_ids == [EOS]
    assert outcome.finished == [Finished(RequestKey(1), FinishReason.STOP, 1, matched_token_id=EOS)]
    assert driver.plan() is None, "no row may be planned after the end is known"
    for _ in range(depth):
        late = driver.commit(55)
        assert (late.keys, late.token_ids, late.finished, late.num_overrun_rows) == ([], [], [], 1)
    assert driver.scheduler.totals.output_tokens == 1
    assert driver.scheduler.lanes[LANE].num_overrun_rows == depth
    assert driver.scheduler.is_idle


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stop_wins_over_length_on_the_last_token(depth: int) -> None:
    """D5: end-of-sequence on the last allowed token reports STOP; any other token there LENGTH."""
    delivered, finished = run_solo([5, EOS], depth=depth, max_tokens=2, stop_token_ids=STOPS)
    assert delivered == [5, EOS]
    assert finished == Finished(RequestKey(1), FinishReason.STOP, 2, matched_token_id=EOS)
    delivered, finished = run_solo([5, 6], depth=depth, max_tokens=2, stop_token_ids=STOPS)
    assert finished == Finished(RequestKey(1), FinishReason.LENGTH, 2)


def test_min_tokens_ignores_early_stops_exactly() -> None:
    """J6: with min_tokens m a stop id counts from output index m on; the index is exact."""
    for min_tokens in (1, 2, 3):
        delivered, finished = run_solo([EOS] * 9, min_tokens=min_tokens, stop_token_ids=STOPS)
        assert len(delivered) == min_tokens + 1
        assert finished.reason is FinishReason.STOP


def test_hard_limits_win_over_min_tokens() -> None:
    """D7: min_tokens = max_tokens ends with LENGTH even on a stop id; so does the context limit."""
    delivered, finished = run_solo([EOS] * 9, max_tokens=4, min_tokens=4, stop_token_ids=STOPS)
    assert (len(delivered), finished.reason) == (4, FinishReason.LENGTH)
    delivered, finished = run_solo([EOS] * 40, max_tokens=40, min_tokens=40, stop_token_ids=STOPS)
    assert (len(delivered), finished.reason) == (32 - 3, FinishReason.LENGTH)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, [EOS]), (1, [EOS, EOS])])
def test_eos_as_the_very_first_token(min_tokens: int, expected: list[int]) -> None:
    """BL-34, D8: a request may end on its first token; one terminal, the core stays usable."""
    delivered, finished = run_solo([EOS, EOS], min_tokens=min_tokens, stop_token_ids=STOPS)
    assert (delivered, finished.reason, finished.num_output_tokens) == (expected, FinishReason.STOP, len(expected))


def test_eos_as_the_first_token_after_a_preemption() -> None:
    """BL-34: resumed after losing its lane, the first new token is EOS."""
    driver = Driver.of()
    driver.add(1, 3, stop_token_ids=STOPS)
    driver.must_plan()
    assert driver.lose() == [1]
    driver.reopen()
    driver.must_plan()
    outcome = driver.commit(EOS)
    assert [(f.key, f.reason) for f in outcome.finished] == [(1, FinishReason.STOP)]


def test_ignore_eos_and_user_stop_ids() -> None:
    """BL-18, D5, D7: without EOS among the stop ids it is a token like any other; a user's stop id still ends."""
    script = [5, 5, 5, 5, 5, EOS, 5, 42, 5]
    delivered, finished = run_solo(script, max_tokens=20)
    assert (len(delivered), finished.reason) == (20, FinishReason.LENGTH)
    delivered, finished = run_solo(script, max_tokens=20, stop_token_ids=frozenset({42}))
    assert (len(delivered), finished.reason, finished.matched_token_id) == (8, FinishReason.STOP, 42)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 1), (2, 2), (28, 28), (29, 29), (30, 29), (1000, 29)])
def test_tiny_and_limit_budgets_give_exact_counts(depth: int, max_tokens: int, expected: int) -> None:
    """BL-19, D2, D3: 1, 2, limit - prompt - 1, limit - prompt, one more, far more."""
    delivered, finished = run_solo([], depth=depth, max_tokens=max_tokens)
    assert (len(delivered), finished.num_output_tokens, finished.reason) == (
        expected,
        expected,
        FinishReason.LENGTH,
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("script", [[7], [7, EOS]])
def test_a_full_batch_ends_together(depth: int, script: list[int]) -> None:
    """BL-09, E9, E10: R rows end in one commit; the next plan is a full batch of newcomers at once."""
    rows = 4
    driver = Driver.of(overlap_depth=depth, num_slots=rows * (depth + 1), num_blocks=64)
    stops = STOPS if len(script) > 1 else frozenset[int]()
    for key in range(1, 3 * rows + 1):
        driver.add(key, 2, max_tokens=1 if len(script) == 1 else 9, stop_token_ids=stops)
    waves: list[int] = []
    outputs: dict[int, list[int]] = {}
    while not driver.scheduler.is_idle:
        plan = driver.plan()
        if plan is not None:
            waves += [len(plan.admissions)] if plan.admissions else []
            continue
        _, step_rows = driver.books[LANE].steps[0]
        result = driver.result(*[0] * len(step_rows))
        by_incarnation = {s.stay.incarnation: s for s in driver.scheduler.sequences.values() if s.stay is not None}
        tokens = [
            script[min(s.num_output_tokens, len(script) - 1)] if (s := by_incarnation.get(i)) else 99
            for i in result.incarnations
        ]
        outcome = driver.commit(*tokens)
        for key, token in zip(outcome.keys, outcome.token_ids, strict=True):
            outputs.setdefault(key, []).append(token)
    assert waves == [rows] * 3
    assert outputs == dict.fromkeys(range(1, 3 * rows + 1), script)


def test_several_rows_end_for_different_reasons_in_one_step() -> None:
    """D8: one commit, one stop, one length, one that goes on; columns keep row order."""
    driver = Driver.of()
    driver.add(1, 2, max_tokens=9, stop_token_ids=STOPS)
    driver.add(2, 2, max_tokens=1)
    driver.add(3, 2, max_tokens=9, stop_token_ids=STOPS)
    driver.must_plan()
    outcome = driver.commit(EOS, 8, 9)
    assert (outcome.keys, outcome.token_ids, outcome.num_rows) == ([1, 2, 3], [EOS, 8, 9], 3)
    assert [(f.key, f.reason.value) for f in outcome.finished] == [(1, "stop"), (2, "length")]


# ------------------------------------------------------------------------------------------------ stop strings


def test_finish_at_cuts_later_outputs() -> None:
    """K6: the shell found a stop string ending at output 2; later tokens are cut, rows in flight are overrun."""
    driver = Driver.of()
    key = driver.add(1, 3, max_tokens=20)
    driver.must_plan()
    for token in (10, 11, 12):
        driver.must_plan()
        driver.commit(token)
    history = driver.sequence(1).history
    assert driver.scheduler.finish_at(key, 2) == Finished(key, FinishReason.STOP, 2)
    assert history[3:] == [10, 11]
    assert driver.commit(13).num_overrun_rows == 1
    assert driver.scheduler.is_idle


def test_finish_at_of_an_ended_request_is_none() -> None:
    """F3, D8: the request ended by itself in the same commit."""
    driver = Driver.of()
    key = driver.add(1, 3, max_tokens=1)
    driver.must_plan()
    driver.commit(10)
    assert driver.scheduler.finish_at(key, 1) is None


@pytest.mark.parametrize("num_output_tokens", [0, 2])
def test_finish_at_beyond_the_history_is_a_bug(num_output_tokens: int) -> None:
    """K6: a match lies within delivered outputs."""
    driver = Driver.of()
    key = driver.add(1, 3)
    driver.must_plan()
    driver.commit(10)
    with pytest.raises(AssertionError, match="stop beyond"):
        driver.scheduler.finish_at(key, num_output_tokens)


def test_finish_at_while_preempted() -> None:
    """K6, F1: a stop string found after the request lost its lane ends it in the queue."""
    driver = Driver.of()
    key = driver.add(1, 3)
    driver.must_plan()
    driver.commit(10)
    driver.lose()
    assert driver.scheduler.finish_at(key, 1) == Finished(key, FinishReason.STOP, 1)
    assert driver.scheduler.is_idle


# ------------------------------------------------------------------------------------------------ deadlines


def test_deadline_in_the_queue_and_while_running() -> None:
    """F4: a queue deadline ends only what was never admitted; a deadline ends both; the phase is told."""
    driver = Driver.of(max_num_seqs=1)
    scheduler = driver.scheduler
    driver.add(1, 3, queue_deadline_ns=5)
    driver.must_plan()
    driver.add(2, 3, queue_deadline_ns=5, deadline_ns=50)
    driver.add(3, 3, deadline_ns=9)
    assert scheduler.next_deadline_ns == 5
    assert scheduler.expire(4) == ()
    assert scheduler.expire(5) == (Finished(RequestKey(2), FinishReason.ERROR, 0, deadline_phase="queue"),)
    assert scheduler.next_deadline_ns == 9
    driver.commit(10)
    assert scheduler.expire(9) == (Finished(RequestKey(3), FinishReason.ERROR, 0, deadline_phase="queue"),)
    # Entries of requests that have ended are dropped without a trace.
    assert scheduler.next_deadline_ns is None
    assert scheduler.expire(1000) == ()
    assert driver.outputs(1) == [10]


def test_deadline_of_a_running_and_of_a_preempted_request() -> None:
    """F1: both are "run"; a queue deadline no longer counts after the first admission (also once preempted)."""
    driver = Driver.of()
    driver.add(1, 3, deadline_ns=10)
    driver.add(2, 3, deadline_ns=20, queue_deadline_ns=11)
    driver.must_plan()
    driver.commit(5, 6)
    assert driver.scheduler.expire(10) == (Finished(RequestKey(1), FinishReason.ERROR, 1, deadline_phase="run"),)
    driver.lose()
    assert driver.scheduler.expire(19) == ()
    assert driver.scheduler.expire(20) == (Finished(RequestKey(2), FinishReason.ERROR, 1, deadline_phase="run"),)
    assert driver.scheduler.is_idle


def test_expire_skips_requests_that_have_ended() -> None:
    """D8: an ended request leaves a deadline behind that must not end anything."""
    driver = Driver.of()
    key = driver.add(1, 3, deadline_ns=3)
    driver.scheduler.abort(key)
    assert driver.scheduler.expire(5) == ()
    assert driver.scheduler.next_deadline_ns is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "prompt_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_impossible_requests_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    """V1, BL-19, BL-21: an empty prompt and max_tokens 0 never become one token."""
    with pytest.raises(ValueError, match=message):
        make_request(1, **fields)  # type: ignore[arg-type]
    assert isinstance(make_request(1), Request)
