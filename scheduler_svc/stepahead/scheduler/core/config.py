"""Frozen limits of the core, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Batching(Enum):
    """When a lane takes newcomers. Neither policy reads how long an answer will be."""

    CONTINUOUS = "continuous"
    """Whenever there is room: a slot is filled again the step after it is free."""
    FIXED = "fixed"
    """Only while the lane is empty: a batch ends together before the next one begins. For comparison."""


class Ordering(Enum):
    """Who of the waiting goes first."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Policy limits that hold for all lanes."""

    overlap_depth: int = 1
    """D: steps that may be dispatched beyond the oldest uncommitted one; 0 is no overlap."""
    settle_prompts_in_place: bool = False
    """Whether a step with explicit rows (prompt chunks) is COMPLETE_IN_PLACE although D > 0."""
    batching: Batching = Batching.CONTINUOUS
    ordering: Ordering = Ordering.FCFS
    ageing_admissions: int = 64
    """With priorities: how many admissions of others promote a waiting request by one level."""
    max_waiting: int | None = None
    """Bound of the waiting queue for newcomers; preempted requests always have a place in it."""
    prefix_caching: bool = True
    model: str = ""
    """Goes into the keys of cached blocks."""
    max_held_steps: int = 8
    """How many steps a request waits for a prefix that is being prefilled on its lane."""
    skip_ahead_window: int = 8
    """How many requests behind a blocked head of the line are tried."""
    max_times_passed: int = 32
    """How often others may pass a blocked request; then nobody does until it is admitted."""
    max_described_tokens: int = 128
    """Prompt positions with log probabilities in one step of a lane. Each costs a row of logits, in time and in
    memory (49,152 x 4 bytes and some 0.5 ms with SmolLM2), and every stream of the lane waits for it."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_depth <= 8:
            raise ValueError(f"overlap_depth must be 0 to 8, not {self.overlap_depth}")
        if self.skip_ahead_window < 0:
            raise ValueError(f"skip_ahead_window must be 0 or more, not {self.skip_ahead_window}")
        if self.ageing_admissions < 1:
            raise ValueError(f"ageing_admissions must be 1 or more, not {self.ageing_admissions}")
        if self.max_waiting is not None and self.max_waiting < 1:
            raise ValueError(f"max_waiting must be 1 or more, not {self.max_waiting}")
        if self.max_held_steps < 0:
            raise ValueError(f"max_held_steps must be 0 or more, not {self.max_held_steps}")
        if self.max_times_passed < 0:
            raise ValueError(f"max_times_passed must be 0 or more, not {self.max_times_passed}")
        if self.max_described_tokens < 1:
            raise ValueError(f"max_described_tokens must be 1 or more, not {self.max_described_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPool:
    """Layers that see a sliding window, and their block pool."""

    window: int
    """Positions a query sees, its own included."""
    num_blocks: int
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("window", "num_blocks", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a window group must be at least 1, not {getattr(self, name)}")

    def most_blocks(self, block_size: int, overlap_depth: int) -> int:
        """Blocks a sequence of any length needs at once, fed token by token (rule N11)."""
        return -(-(self.window + overlap_depth) // block_size) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    """Size of one worker's batch and cache, as the worker states it."""

    num_slots: int
    """Rows of the persistent batch; at least max_num_seqs, best max_num_seqs * (D + 1)."""
    max_num_seqs: int
    """Sequences that may run in one step."""
    max_num_batched_tokens: int
    """Tokens one step may feed; at least max_num_seqs, so that every decode row always fits."""
    max_model_len: int
    """Prompt and output of a sequence together."""
    num_blocks: int
    """Of the layers that see everything; 0 if there are none."""
    block_size: int
    """Tokens per block."""
    windows: tuple[WindowPool, ...] = ()
    """Of the layers that see a window, a pool for each size of it."""
    replays_windows: bool = False
    """Whether the worker computes the states of window layers again alone, see `window_replay.py`."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_blocks < (0 if self.windows else 1):
            raise ValueError(f"num_blocks must be at least 1, not {self.num_blocks}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.num_slots < self.max_num_seqs:
            raise ValueError(f"num_slots {self.num_slots} must be at least max_num_seqs {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}"
            )

    @property
    def largest_window(self) -> int:
        """Positions that some layer sees at most; 0 if every layer sees all."""
        return max((each.window for each in self.windows), default=0)

    @property
    def exact_replay_tokens(self) -> int:
        """Positions in front of one that decide all that its window layers see (rule N8)."""
        return sum(each.num_layers * (each.window - 1) for each in self.windows)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def num_cache_tokens(self, overlap_depth: int) -> int:
        """Positions the longest sequence may have in the pools, alone; a large enough window pool sets no limit."""
        pools = [self.num_blocks] if self.num_blocks else []
        pools += [
            each.num_blocks
            for each in self.windows
            if each.num_blocks < each.most_blocks(self.block_size, overlap_depth)
        ]
        return min((num_blocks * self.block_size for num_blocks in pools), default=self.max_model_len)
