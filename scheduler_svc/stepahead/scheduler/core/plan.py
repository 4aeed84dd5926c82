"""What goes to a lane and what comes back, as values. `convert.py` of the shell maps them to wire messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stepahead.scheduler.core.ids import BlockId, Incarnation, SlotId, StepId
from stepahead.scheduler.core.request import SamplingSpec


class SettleMode(Enum):
    """Who waits for a step's results."""

    COMPLETE_IN_PLACE = "complete_in_place"
    RETAIN = "retain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence enters a slot with everything a replay needs."""

    slot: SlotId
    incarnation: Incarnation
    token_ids: tuple[int, ...]
    """The whole history."""
    num_prompt_tokens: int
    num_settled_tokens: int
    replay_start: int | None = None
    """First position fed, where there is a replay; see `window_replay.py`."""
    block_ids: tuple[BlockId, ...]
    """Table after table of the lane's KV groups, without null entries."""
    block_counts: tuple[int, ...] = ()
    """Entries of each group in `block_ids`; empty: there is one group."""
    null_counts: tuple[int, ...] = ()
    """Null entries in front of each group's table; empty: none."""
    sampling: SamplingSpec
    min_tokens: int
    constrained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step as a delta; columns named alike belong together. See worker.proto for the meaning of each."""

    step_id: StepId
    committed_through: StepId
    settle: SettleMode
    released_slots: tuple[SlotId, ...] = ()
    released_incarnations: tuple[Incarnation, ...] = ()
    append_slots: tuple[SlotId, ...] = ()
    append_block_ids: tuple[BlockId, ...] = ()
    """One block per entry of append_slots."""
    append_groups: tuple[int, ...] = ()
    """KV group of each; empty: group 0."""
    copy_src_block_ids: tuple[BlockId, ...] = ()
    copy_dst_block_ids: tuple[BlockId, ...] = ()
    admissions: tuple[Admission, ...] = ()
    joined_slots: tuple[SlotId, ...] = ()
    sit_out_slots: tuple[SlotId, ...] = ()
    left_slots: tuple[SlotId, ...] = ()
    row_slots: tuple[SlotId, ...] = ()
    row_starts: tuple[int, ...] = ()
    row_counts: tuple[int, ...] = ()
    row_samples: tuple[bool, ...] = ()
    total_tokens: int
    total_rows: int


class RowFault(Enum):
    """A row that failed on the worker. The values are the wire's RowError codes by name."""

    NON_FINITE = "non_finite"
    POSITION_MISMATCH = "position_mismatch"
    NOTHING_ALLOWED = "nothing_allowed"
    GATE_MISSING = "gate_missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of one row as columns, one entry per token."""

    first_position: int
    """Of the first entry's token, counted from the start of the prompt."""
    token_logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top_counts: tuple[int, ...]
    """Entries of the next two columns per token."""
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The completion of one step. Rows in plan order: explicit rows, then decode members by joining order."""

    epoch: int
    """The lane epoch the step was dispatched in; results of older ones are counted and dropped."""
    step_id: StepId
    incarnations: list[Incarnation]
    token_counts: list[int] | None
    """Tokens per row, 0 or 1; None: one each."""
    token_ids: list[int]
    faults: dict[Incarnation, RowFault]
    logprobs: dict[Incarnation, TokenLogprobs] = field(default_factory=dict[Incarnation, TokenLogprobs])
    """Of the sampled token, for rows that ask."""
    prompt_logprobs: dict[Incarnation, TokenLogprobs] = field(default_factory=dict[Incarnation, TokenLogprobs])
    """Of the prompt positions a row has fed, for rows that ask."""
