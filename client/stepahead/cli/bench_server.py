"""What a server says of the steps of one load: idle device, gaps, the step loop's latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepahead.cli.bench_stats import percentile
from stepahead.client.channel import open_aio_channel
from stepahead.v1 import operations_pb2, operations_pb2_grpc

MAX_TIMELINE = 4096
"""Records a scheduler keeps per worker: of a longer load the newest are seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Over some steps. Only steps whose work was waiting count: a gap before any other is nobody's fault."""

    num_steps: int
    idle_fraction: float
    """Gaps before forwards and waits between forward and sampling, over these and the busy time."""
    gap_us_p50: float
    gap_us_p99: float
    boundary_to_plan_us_p50: float
    boundary_to_plan_us_p99: float
    step_ms_p50: float


def step_figures(records: Sequence[operations_pb2.StepRecord]) -> StepFigures:
    """Sums recorded steps up."""
    waited = [record for record in records if record.work_waited]
    idle_ns = sum(record.gap_ns + record.sample_wait_ns for record in waited)
    busy_ns = sum(record.busy_ns for record in waited)
    gaps_us = [record.gap_ns / 1e3 for record in waited]
    latencies_us = [record.boundary_to_plan_ns / 1e3 for record in waited if record.boundary_to_plan_ns]
    return StepFigures(
        num_steps=len(records),
        idle_fraction=idle_ns / max(1, idle_ns + busy_ns),
        gap_us_p50=percentile(gaps_us, 0.5),
        gap_us_p99=percentile(gaps_us, 0.99),
        boundary_to_plan_us_p50=percentile(latencies_us, 0.5),
        boundary_to_plan_us_p99=percentile(latencies_us, 0.99),
        step_ms_p50=percentile([(r.gap_ns + r.sample_wait_ns + r.busy_ns) / 1e6 for r in waited], 0.5),
    )


@dataclass(frozen=True, slots=True)
class WatchedSteps:
    """The steps of one load, over all workers."""

    records: list[operations_pb2.StepRecord]
    running_share: float
    """Boundaries that said another step was running."""


async def workers_of(address: str) -> list[operations_pb2.WorkerStatus]:
    """The workers as they stand: what `watched_steps` wants from before the load."""
    async with open_aio_channel(address) as channel:
        operations = operations_pb2_grpc.OperationsServiceStub(channel)
        return list((await operations.GetStatus(operations_pb2.GetStatusRequest())).workers)


async def watched_steps(address: str, before: Sequence[operations_pb2.WorkerStatus]) -> WatchedSteps:
    """The steps since `before`.

    Args:
        address: of the scheduler.
        before: the workers before the load.
    """
    earlier = {worker.address: worker.steps for worker in before}
    records: list[operations_pb2.StepRecord] = []
    num_running = num_boundaries = 0
    async with open_aio_channel(address) as channel:
        operations = operations_pb2_grpc.OperationsServiceStub(channel)
        for worker in (await operations.GetStatus(operations_pb2.GetStatusRequest())).workers:
            then = earlier.get(worker.address, operations_pb2.StepStats())
            num_steps = worker.steps.boundaries - then.boundaries
            num_boundaries += num_steps
            num_running += worker.steps.boundaries_with_running_step - then.boundaries_with_running_step
            if num_steps:
                limit = min(MAX_TIMELINE, num_steps)
                request = operations_pb2.GetTimelineRequest(worker_address=worker.address, limit=limit)
                records += (await operations.GetTimeline(request)).records
    return WatchedSteps(records, num_running / max(1, num_boundaries))
