"""Rule B8: a plan depends on how many tokens are in flight, never on which."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.scheduler.core import LaneId, RequestKey, StepPlan
from tests.scheduler.core.builders import Driver

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9), st.integers(1, 9)),
        st.tuples(st.just("plan"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("plan"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("commit"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("commit"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("abort"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 1), st.just(0)),
    ),
    min_size=10,
    max_size=80,
)
SIZES = st.fixed_dictionaries(
    {
        "overlap_depth": st.integers(0, 2),
        "num_lanes": st.just(2),
        "num_blocks": st.integers(5, 9),
        "block_size": st.integers(1, 3),
        "max_model_len": st.just(14),
        "max_num_seqs": st.integers(1, 3),
        "max_num_batched_tokens": st.integers(3, 8),
    }
)


def value_free(plan: StepPlan) -> dict[str, object]:
    """A plan without token values: an admission's history counts by its length."""
    columns = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    columns["admissions"] = [
        dataclasses.replace(admission, token_ids=(0,) * len(admission.token_ids)) for admission in plan.admissions
    ]
    return columns


def replay(
    sizes: dict[str, int], events: list[tuple[str, int, int]], token: Callable[[int], int]
) -> list[dict[str, object]]:
    """Runs the schedule; the n-th sampled token is `token(n)`. Returns every plan without token values."""
    driver = Driver.of(**sizes)
    plans: list[dict[str, object]] = []
    sampled = 0
    key = 0
    for kind, first, second in events:
        lane_id = LaneId(first)
        if kind == "add" and first + second - 1 <= sizes["num_blocks"] * sizes["block_size"]:
            key += 1
            driver.add(key, first, max_tokens=min(second, 14 - first))
        elif kind == "plan":
            plan = driver.plan(lane_id)
            plans += [value_free(plan)] if plan is not None else []
        elif kind == "commit" and driver.books[lane_id].steps:
            _, rows = driver.books[lane_id].steps[0]
            count = sum(row.samples for row in rows)
            driver.commit(*(token(sampled + i) for i in range(count)), lane_id=lane_id)
            sampled += count
        elif kind == "abort":
            driver.scheduler.abort(RequestKey(first))
        elif kind == "lose":
            driver.lose(lane_id)
            own = {name: size for name, size in sizes.items() if name not in ("overlap_depth", "num_lanes")}
            driver.reopen(lane_id, epoch=len(plans) + 2, **own)
    return plans


@settings(derandomize=True, database=None, deadline=None, max_examples=120)
@given(sizes=SIZES, events=EVENTS)
def test_the_same_schedule_with_other_tokens_gives_the_same_plans(
    sizes: dict[str, int], events: list[tuple[str, int, int]]
) -> None:
    """B8: without stop ids token values decide nothing."""
    assert replay(sizes, events, lambda n: 0) == replay(sizes, events, lambda n: 7919 * n + 1)


def test_plans_while_a_token_is_in_flight_do_not_wait_for_it() -> None:
    """B8: even with stop ids, everything planned before the commit is the same."""
    plans: list[list[dict[str, object]]] = []
    for token in (2, 3):
        driver = Driver.of(overlap_depth=2)
        driver.add(1, 3, stop_token_ids=frozenset({2}))
        seen = [value_free(driver.must_plan()) for _ in range(3)]
        finished = driver.commit(token).finished
        assert bool(finished) == (token == 2)
        plans.append(seen)
    assert plans[0] == plans[1]
