"""What a newcomer to a lane need not feed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepahead.scheduler.core.ids import BlockId, BlockKey
from stepahead.scheduler.core.window_replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The part of a history that a lane knows."""

    cached: list[BlockId]
    """Its blocks in the layers that see everything."""
    keys: Sequence[BlockKey]
    """Their keys; every KV group has what a row behind them reads, unless there is a replay."""
    num_unfed: int
    """Positions that need not be fed: the cached blocks, for a fork everything but the last position; with a replay
    those in front of it."""
    copy_from: BlockId | None = None
    """For a fork whose prompt ends inside a block: the block to copy."""
    replay: Replay | None = None
