"""What the core tells the shell."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepahead.scheduler.core.ids import Incarnation, LaneId, RequestKey, SlotId, StepId
from stepahead.scheduler.core.plan import RowFault, StepPlan, TokenLogprobs
from stepahead.scheduler.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got a slot."""

    key: RequestKey
    lane_id: LaneId
    first_time: bool
    num_cached_tokens: int = 0
    """Positions found in the prefix cache."""
    replays: bool = False
    """Whether its window layers alone are computed again."""
    approximate_from: int | None = None
    """If that takes fewer positions than exact states need: the index of the first output that may show it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """A constrained row that samples in the oldest step in flight."""

    key: RequestKey
    slot: SlotId
    incarnation: Incarnation
    position: int
    """What it feeds last."""
    wanted: bool
    """Whether its sample still counts: False once the request has ended, or behind a row that sampled nothing."""


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
    logprobs: dict[RequestKey, TokenLogprobs] = field(default_factory=dict[RequestKey, TokenLogprobs])
    """Of tokens in `token_ids`, for requests that ask (rule J7)."""
    prompt_logprobs: dict[RequestKey, TokenLogprobs] = field(default_factory=dict[RequestKey, TokenLogprobs])
    """Of live requests that ask; a request that was preempted may give the same positions again (rule J8)."""
