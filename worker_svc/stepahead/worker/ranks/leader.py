"""`Leader`: what rank 0 does for all ranks, whatever they compute on."""

from __future__ import annotations

from typing import Protocol

from stepahead.worker.ranks.messages import Allocate, Stop
from stepahead.worker.ranks.rank_group import RankGroup
from stepahead.worker.ranks.start_up import RankReport, complete_together
from stepahead.worker.runner import CacheShape


class _Shard(Protocol):
    """What a leader knows of the engine that holds rank 0's shard."""

    @property
    def kv_bytes_per_token(self) -> int: ...

    def allocate(self, shape: CacheShape) -> None: ...


class Leader:
    """Base of the leaders: the sizes of all ranks together, and what all do at once.

    Args:
        shard: rank 0's.
        group: all ranks.
        reports: of all ranks, from `load_together`.
    """

    def __init__(self, shard: _Shard, group: RankGroup, reports: tuple[RankReport, ...]) -> None:
        self._shard_memory = shard
        self._group = group
        self.weight_bytes = self.stored_bytes = sum(report.weight_bytes for report in reports)
        self.kv_bytes_per_token = group.size * shard.kv_bytes_per_token

    def allocate(self, shape: CacheShape) -> None:
        """Allocates every rank's cache. Raises `ModelError` if one does not fit."""
        self._group.send(Allocate(shape))
        complete_together(self._group, lambda: self._shard_memory.allocate(shape))

    def end(self) -> None:
        """Lets the other ranks end. No other call may follow."""
        self._group.send(Stop())
        self._group.close()
