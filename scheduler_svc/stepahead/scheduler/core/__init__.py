"""The scheduler core: pure functions of what it is told.

Nothing in this package reads a clock, draws a random number, logs, awaits or touches a wire message. Time and
results come in as arguments; plans and events go out as values. `import-linter` holds it to that.
"""

from stepahead.scheduler.core.config import Batching, LaneConfig, Ordering, SchedulerConfig, WindowPool
from stepahead.scheduler.core.errors import (
    CoreError,
    QueueFull,
    RequestInfeasible,
    StepMismatch,
    UnknownLane,
)
from stepahead.scheduler.core.events import (
    Admitted,
    CommitOutcome,
    Finished,
    GateRow,
    PlanOutcome,
    Preempted,
)
from stepahead.scheduler.core.ids import BlockId, Incarnation, LaneId, RequestKey, SlotId, StepId
from stepahead.scheduler.core.plan import Admission, RowFault, SettleMode, StepPlan, StepResult, TokenLogprobs
from stepahead.scheduler.core.request import FinishReason, Request, RequestStatus, SamplingSpec
from stepahead.scheduler.core.scheduler import Scheduler

__all__ = [
    "Admission",
    "Admitted",
    "Batching",
    "BlockId",
    "CommitOutcome",
    "CoreError",
    "FinishReason",
    "Finished",
    "GateRow",
    "Incarnation",
    "LaneConfig",
    "LaneId",
    "Ordering",
    "PlanOutcome",
    "Preempted",
    "QueueFull",
    "Request",
    "RequestInfeasible",
    "RequestKey",
    "RequestStatus",
    "RowFault",
    "SamplingSpec",
    "Scheduler",
    "SchedulerConfig",
    "SettleMode",
    "SlotId",
    "StepId",
    "StepMismatch",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "UnknownLane",
    "WindowPool",
]
