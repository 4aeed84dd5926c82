"""What overlap is measured by."""

from __future__ import annotations

from typing import Any

import pytest

from stepahead.scheduler.step_stats import WINDOW, StepRecord, StepStats, percentile
from stepahead.v1 import worker_pb2


def record(step_id: int, **fields: Any) -> StepRecord:
    defaults: dict[str, Any] = {
        "completed_step_id": step_id,
        "running_step_id": 0,
        "num_rows": 1,
        "num_tokens": 1,
        "num_committed_tokens": 1,
        "gap_ns": 0,
        "busy_ns": 0,
        "sample_wait_ns": 0,
        "boundary_to_plan_ns": 0,
        "work_waited": True,
    }
    return StepRecord(**(defaults | fields))


def add(stats: StepStats, step_id: int, **fields: Any) -> None:
    entry = record(step_id, **fields)
    stats.add(worker_pb2.StepBoundary(completed_step_id=step_id, running_step_id=entry.running_step_id), entry)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0),
        ([7], 0.99, 7),
        ([2, 1], 0.5, 1),
        ([3, 1, 2], 0.5, 2),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 101)), 0.5, 50),
        (list(range(1, 101)), 1.0, 100),
        ([1, 2, 3], 0.0, 1),
    ],
)
def test_percentiles_are_nearest_rank(values: list[int], share: float, expected: int) -> None:
    assert percentile(values, share) == expected


def test_boundaries_with_a_running_step_are_counted() -> None:
    stats = StepStats()
    for step_id in range(1, 11):
        add(stats, step_id, running_step_id=step_id + 1 if step_id < 8 else 0, busy_ns=100)
    told = stats.to_proto()
    assert (told.boundaries, told.boundaries_with_running_step, told.busy_ns) == (10, 7, 1000)


def test_only_gaps_with_work_waiting_are_idle_time() -> None:
    """A lane that had nothing to do is not slow."""
    stats = StepStats()
    add(stats, 1, gap_ns=10**9, work_waited=False)
    add(stats, 2, gap_ns=5, sample_wait_ns=2)
    add(stats, 3, gap_ns=7)
    told = stats.to_proto()
    assert (told.idle_ns, told.gap_ns_p50, told.gap_ns_p99) == (14, 5, 7)


def test_boundaries_without_a_plan_have_no_latency() -> None:
    stats = StepStats()
    add(stats, 1, boundary_to_plan_ns=30)
    add(stats, 2)
    told = stats.to_proto()
    assert (told.boundary_to_plan_ns_p50, told.boundary_to_plan_ns_p99) == (30, 30)


def test_the_timeline_is_the_newest_records_oldest_first() -> None:
    stats = StepStats()
    for step_id in range(1, WINDOW + 10):
        add(stats, step_id, num_rows=step_id)
    assert [each.completed_step_id for each in stats.timeline(3)] == [WINDOW + 7, WINDOW + 8, WINDOW + 9]
    assert len(stats.timeline(10**6)) == WINDOW
    assert stats.timeline(1)[0].rows == WINDOW + 9
    assert stats.to_proto().boundaries == WINDOW + 9, "counters know more than the window"
