"""The simulation inside the normal suite; `make sim` runs many more seeds."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import FAULT_COUNTERS, run_seeds
from tests.simulation.world import World


@pytest.mark.parametrize("start", range(0, 240, 40))
def test_answers_equal_the_oracle_for_every_schedule(start: int) -> None:
    """Rules A1-A8, B1-B5, D1-D9, E1-E9, F1-F5, G1-G5, I1-I5, I7, J3-J5, K6, O8 over seeded worlds with faults."""
    _, failed = run_seeds(start, 40)
    assert failed is None


def test_every_kind_of_trouble_happens() -> None:
    """A simulation that never preempts or crashes proves nothing."""
    total, failed = run_seeds(1000, 200)
    assert failed is None
    assert [name for name in FAULT_COUNTERS if not total[name]] == []


def test_a_seed_replays_exactly() -> None:
    """The core reads no clock and draws no number: one seed, one history."""
    first, second = World(17), World(17)
    first.run()
    second.run()
    assert first.counters == second.counters
    assert [c.tokens for c in first.clients.values()] == [c.tokens for c in second.clients.values()]
