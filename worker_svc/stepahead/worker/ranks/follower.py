"""Ranks 1 and up: they compute what rank 0 tells them and never speak to a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from stepahead.worker.ranks.messages import Allocate, DeviceWork, HostWork, Stop
from stepahead.worker.ranks.start_up import complete_together

if TYPE_CHECKING:
    from stepahead.worker.ranks.rank_group import RankGroup
    from stepahead.worker.runner import CacheShape


class Shard(Protocol):
    """A rank's part of the model on its device, told what to do."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        ...

    def allocate(self, shape: CacheShape) -> None:
        """Allocates its part of the cache. Raises `ModelError` if it does not fit."""
        ...

    def perform(self, message: HostWork | DeviceWork) -> None:
        """Does what rank 0 does at the same time. Raises `RankLost`."""
        ...

    def release(self) -> None:
        """Gives back what must be gone before the ranks part."""
        ...


def run_follower(group: RankGroup, load: Callable[[RankGroup], Shard]) -> None:
    """Serves as one rank until rank 0 says that the worker ends.

    Args:
        group: all ranks, from `connect`.
        load: loads this rank's shard while rank 0 loads its own.

    Raises:
        ModelError: one of the ranks cannot load the model.
        RankLost: another rank is gone.
    """
    shard = load(group)
    follow(group, shard)
    group.close()


def follow(group: RankGroup, shard: Shard) -> None:
    """Does what rank 0 says until it says Stop. Raises `RankLost`."""
    while True:
        message = group.receive()
        match message:
            case Allocate(shape):
                complete_together(group, lambda shape=shape: shard.allocate(shape))
            case Stop():
                shard.release()
                return
            case _:
                shard.perform(message)
