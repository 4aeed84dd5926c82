"""What zero-overhead scheduling is measured by: gaps, busy time, boundary-to-plan latency."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from stepahead.scheduler.core import CommitOutcome
from stepahead.v1 import operations_pb2, worker_pb2

WINDOW = 4096
"""Boundaries that percentiles and the timeline look back on."""


@dataclass(slots=True)
class StepRecord:
    """One boundary as the scheduler saw it; durations in nanoseconds."""

    completed_step_id: int
    running_step_id: int
    num_rows: int
    num_tokens: int
    num_committed_tokens: int
    gap_ns: int
    busy_ns: int
    sample_wait_ns: int
    boundary_to_plan_ns: int
    work_waited: bool
    """Whether the step could have been there before its predecessor ended; else its gap is nobody's fault."""
    plan: worker_pb2.StepPlan | None = None
    """As sent; only with --record-steps, like the boundary."""
    boundary: worker_pb2.StepBoundary | None = None


def record_of(
    boundary: worker_pb2.StepBoundary, outcome: CommitOutcome, plan_ns: int, *, work_waited: bool
) -> StepRecord:
    """What a boundary and its commit say.

    Args:
        boundary: as received.
        outcome: of its commit.
        plan_ns: from the read to the next plan; 0: none was sent.
        work_waited: see `StepRecord`.
    """
    timings = boundary.completion.timings
    return StepRecord(
        completed_step_id=boundary.completed_step_id,
        running_step_id=boundary.running_step_id,
        num_rows=outcome.num_rows,
        num_tokens=outcome.num_tokens,
        num_committed_tokens=len(outcome.token_ids),
        gap_ns=boundary.gap_ns,
        busy_ns=timings.forward_ns + timings.sample_ns,
        sample_wait_ns=timings.sample_wait_ns,
        boundary_to_plan_ns=plan_ns,
        work_waited=work_waited,
    )


def percentile(values: list[int], share: float) -> int:
    """The value below which `share` of the values lie (nearest rank); 0 for no values."""
    if not values:
        return 0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class StepStats:
    """Counters of one lane over its life, and a ring of the newest records."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=WINDOW)
        self.num_boundaries = 0
        self.num_running_boundaries = 0
        self.busy_ns = 0
        self.idle_ns = 0
        self.num_resumes = 0

    def add(self, boundary: worker_pb2.StepBoundary, record: StepRecord) -> None:
        """Takes note of a boundary."""
        self.records.append(record)
        self.num_boundaries += 1
        self.num_running_boundaries += boundary.running_step_id != 0
        self.busy_ns += record.busy_ns
        if record.work_waited:
            # Waiting between forward and sampling is idle device time too, if nobody asked for it.
            self.idle_ns += record.gap_ns + record.sample_wait_ns

    def to_proto(self) -> operations_pb2.StepStats:
        """As status shows it; the lane's ids are the caller's."""
        waited = [record for record in self.records if record.work_waited]
        gaps = [record.gap_ns for record in waited]
        latencies = [record.boundary_to_plan_ns for record in self.records if record.boundary_to_plan_ns]
        return operations_pb2.StepStats(
            boundaries_with_running_step=self.num_running_boundaries,
            boundaries=self.num_boundaries,
            busy_ns=self.busy_ns,
            idle_ns=self.idle_ns,
            gap_ns_p50=percentile(gaps, 0.5),
            gap_ns_p99=percentile(gaps, 0.99),
            boundary_to_plan_ns_p50=percentile(latencies, 0.5),
            boundary_to_plan_ns_p99=percentile(latencies, 0.99),
            resumes=self.num_resumes,
        )

    def timeline(self, limit: int) -> list[operations_pb2.StepRecord]:
        """The newest records, oldest first."""
        newest = list(self.records)[-limit:]
        return [
            operations_pb2.StepRecord(
                completed_step_id=record.completed_step_id,
                running_step_id=record.running_step_id,
                rows=record.num_rows,
                tokens=record.num_tokens,
                committed_tokens=record.num_committed_tokens,
                gap_ns=record.gap_ns,
                busy_ns=record.busy_ns,
                boundary_to_plan_ns=record.boundary_to_plan_ns,
                work_waited=record.work_waited,
                sample_wait_ns=record.sample_wait_ns,
                plan=record.plan,
                boundary=record.boundary,
            )
            for record in newest
        ]
