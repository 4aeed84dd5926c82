"""Fixed and continuous batching as policies: the round tables of the batch experiment."""

from __future__ import annotations

import pytest

from stepahead.scheduler.core import Batching, Finished, RequestKey
from tests.scheduler.core.builders import LANE, Driver

NAMES = {1: "A", 2: "B", 3: "C"}


def rounds(
    policy: Batching, lengths: dict[int, int], *, late: int | None = None
) -> tuple[list[str], dict[str, int]]:
    """Plays all requests to their end; returns who ran in each round and when each ended.

    Args:
        policy: of the scheduler.
        lengths: output tokens by key; everybody arrives at the start.
        late: if given, request 3 arrives at the start of this round.
    """
    driver = Driver.of(overlap_depth=0, max_num_seqs=2, num_slots=2, policy={"batching": policy})
    for key, length in lengths.items():
        if key != 3 or late is None:
            driver.add(key, 1, max_tokens=length)
    table: list[str] = []
    ends: dict[str, int] = {}
    while not driver.scheduler.is_idle or (late is not None and len(table) < late):
        if late == len(table) + 1:
            driver.add(3, 1, max_tokens=lengths[3])
        driver.must_plan()
        stays = [stay for stay, _, _ in driver.scheduler.lanes[LANE].in_flight[0].explicit_rows]
        stays += driver.scheduler.lanes[LANE].in_flight[0].decode_rows
        table.append("".join(sorted(NAMES[stay.sequence.request.key] for stay in stays)))
        finished: list[Finished] = driver.commit(*[9] * len(stays)).finished
        ends |= {NAMES[RequestKey(each.key)]: len(table) for each in finished}
    return table, ends


@pytest.mark.parametrize(
    ("policy", "lengths", "table", "ends"),
    [
        (Batching.FIXED, {1: 2, 2: 4, 3: 1}, ["AB", "AB", "B", "B", "C"], {"A": 2, "B": 4, "C": 5}),
        (Batching.CONTINUOUS, {1: 2, 2: 4, 3: 1}, ["AB", "AB", "BC", "B"], {"A": 2, "B": 4, "C": 3}),
        (Batching.FIXED, {1: 4, 2: 4, 3: 1}, ["AB"] * 4 + ["C"], {"A": 4, "B": 4, "C": 5}),
        (Batching.CONTINUOUS, {1: 4, 2: 4, 3: 1}, ["AB"] * 4 + ["C"], {"A": 4, "B": 4, "C": 5}),
    ],
)
def test_the_round_tables_of_the_batch_experiment(policy, lengths, table, ends) -> None:
    """Golden values: refilling saves a round only where somebody ends early; the useful work is the same."""
    assert rounds(policy, lengths) == (table, ends)


def test_a_late_arrival_takes_a_slot_that_stood_empty() -> None:
    """C comes at round 4: the empty place in round 3 is no fault of the scheduler."""
    assert rounds(Batching.CONTINUOUS, {1: 2, 2: 4, 3: 1}, late=4) == (
        ["AB", "AB", "B", "BC"],
        {"A": 2, "B": 4, "C": 4},
    )
