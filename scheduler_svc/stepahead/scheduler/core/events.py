"""What the core tells the shell."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepahead.scheduler.core.ids import LaneId, RequestKey, StepId
from stepahead.scheduler.core.plan import RowFault, StepPlan
from stepahead.scheduler.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got a slot."""

    key: RequestKey
    lane_id: LaneId
    first_time: bool
    num_cached_tokens: int = 0
    """Positions found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request lost its slot and waits again."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended; nothing follows for its key."""

    key: RequestKey
    reason: FinishReason
    num_output_tokens: int
    matched_token_id: int | None = None
    """The stop or end-of-sequence id, if that ended it."""
    fault: RowFault | None = None
    """What failed on the worker, if reason is ERROR and a row failed."""
    deadline_phase: str | None = None
    """"queue" or "run", if a deadline ended it."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """The next step of a lane, or None, and what planning it changed."""

    plan: StepPlan | None
    admitted: tuple[Admitted, ...] = ()
    preempted: tuple[Preempted, ...] = ()


@dataclass(slots=True)
class CommitOutcome:
    """What one completion changed. Columns `keys` and `token_ids` belong together, in row order."""

    step_id: StepId
    keys: list[RequestKey] = field(default_factory=list[RequestKey])
    token_ids: list[int] = field(default_factory=list[int])
    finished: list[Finished] = field(default_factory=list[Finished])
    num_overrun_rows: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    """Tokens the step fed."""
