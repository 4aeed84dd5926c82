"""The server's status as frozen values: counts are integers, durations nanoseconds, shares floats."""

import enum
from dataclasses import dataclass


class SchedulerState(enum.StrEnum):
    """What the scheduler is doing."""

    NOT_READY = "not_ready"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Batch slots of one worker by state."""

    total: int
    free: int
    owned: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """KV blocks of one worker by state; the states sum to the total."""

    total: int
    free: int
    owned: int
    cached_idle: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class StepStats:
    """Step accounting of one worker since its session began."""

    last_dispatched_step_id: int
    last_committed_step_id: int
    boundaries_with_running_step: int
    boundaries: int
    busy_ns: int
    # Only idle time while work was waiting.
    idle_ns: int
    gap_ns_p50: int
    gap_ns_p99: int
    boundary_to_plan_ns_p50: int
    boundary_to_plan_ns_p99: int
    resumes: int
    overrun_rows: int

    @property
    def overlap_share(self) -> float | None:
        """Share of boundaries at which the next step was already running, 0 to 1; None before the first."""
        return self.boundaries_with_running_step / self.boundaries if self.boundaries else None

    @property
    def idle_fraction(self) -> float | None:
        """Device idle time with work waiting over idle + busy time, 0 to 1; None before the first step."""
        total_ns = self.idle_ns + self.busy_ns
        return self.idle_ns / total_ns if total_ns else None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, seen from the scheduler."""

    address: str
    connected: bool
    worker_instance_id: str
    device: str
    worker_epoch: int
    num_running: int
    slots: SlotCounts
    blocks: BlockCounts
    steps: StepStats


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the scheduler started."""

    requests_accepted: int
    requests_finished: int
    requests_cancelled: int
    requests_failed: int
    output_tokens: int
    prefill_tokens: int
    preemptions: int
    # Sequences whose sliding windows alone were computed again, and those among them from fewer positions than
    # exact states take.
    window_replays: int = 0
    approximate_replays: int = 0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Everything at a glance."""

    version: str
    scheduler_instance_id: str
    model: str
    state: SchedulerState
    num_waiting: int
    num_running: int
    overlap_depth: int
    uptime_ns: int
    totals: Totals
    workers: tuple[WorkerStatus, ...]
