"""A worker in virtual time: it runs one step after the other, each as long as a straight line says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stepahead.scheduler.bench.plan_mirror import PlanMirror, StepRows, result_of
from stepahead.scheduler.core import LaneId, StepPlan, StepResult

_EPOCH = 1


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Time of a step: `step_ns + token_ns * tokens`. Attention over long contexts is not in it."""

    step_ns: int
    token_ns: int

    def duration_ns(self, num_tokens: int) -> int:
        """Time of a step that feeds `num_tokens` tokens."""
        return self.step_ns + self.token_ns * num_tokens


class SimulatedLane:
    """Takes plans, gives back results when their time has come. Hand-over takes no time."""

    epoch = _EPOCH

    def __init__(self, lane_id: LaneId, speed: DeviceSpeed, token_id: int) -> None:
        self.lane_id = lane_id
        self.busy_ns = 0
        """Time the device has run steps."""
        self._speed = speed
        self._token_id = token_id
        self._mirror = PlanMirror()
        self._steps: deque[tuple[int, StepRows]] = deque()
        self._free_at_ns = 0

    def accept(self, plan: StepPlan, now_ns: int) -> None:
        """Queues a step behind those before it."""
        rows = self._mirror.rows_of(plan)
        duration_ns = self._speed.duration_ns(rows.num_tokens)
        self._free_at_ns = max(self._free_at_ns, now_ns) + duration_ns
        self.busy_ns += duration_ns
        self._steps.append((self._free_at_ns, rows))

    @property
    def next_end_ns(self) -> int | None:
        """When the oldest step ends."""
        return self._steps[0][0] if self._steps else None

    def completed(self) -> StepResult:
        """The result of the oldest step; every sampling row gets the same token."""
        _, rows = self._steps.popleft()
        return result_of(rows, epoch=_EPOCH, token_id=self._token_id)
