"""Deliberate breakages of the prefix cache and of forks; see mutations.py."""

# pyright: reportPrivateUsage=false
# A mutation replaces private functions; that is its purpose.

from __future__ import annotations

from collections.abc import Iterable

import pytest

from stepahead.scheduler.core import placement, planning
from stepahead.scheduler.core.block_pool import BlockPool
from stepahead.scheduler.core.config import SchedulerConfig
from stepahead.scheduler.core.ids import BlockKey
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.prefix import Prefix
from stepahead.scheduler.core.prefix_cache import KeyChain
from stepahead.scheduler.core.sequence import Sequence, Stay
from stepahead.scheduler.core.step_in_flight import StepInFlight


def publish_unsettled_blocks(patch: pytest.MonkeyPatch) -> None:
    """Keys blocks by what is dispatched, not by what is settled (H1, H2)."""
    publish = Lane.publish_settled
    announce = Lane.announce_prefill

    def mutant(lane: Lane, stay: Stay, keys: Iterable[BlockKey]) -> None:
        announce(lane, stay, keys)
        settled, stay._settled = stay._settled, len(stay.sequence.history) - 1
        publish(lane, stay)
        stay._settled = settled

    patch.setattr(Lane, "announce_prefill", mutant)


def keys_without_their_past(patch: pytest.MonkeyPatch) -> None:
    """A block's key covers its own tokens only (H4, H6)."""

    def mutant(chain: KeyChain, num_blocks: int) -> list[BlockKey]:
        size = chain._block_size
        blocks = [chain._history[index * size : (index + 1) * size] for index in range(num_blocks)]
        return [BlockKey(repr(tokens).encode()) for tokens in blocks]

    patch.setattr(KeyChain, "first", mutant)


def hit_the_whole_history(patch: pytest.MonkeyPatch) -> None:
    """Leaves nothing to compute when everything is cached (H5)."""

    def mutant(sequence: Sequence, lane: Lane) -> object:
        if lane.cache_model is None:
            return ()
        size = lane.config.block_size
        return sequence.block_keys(len(sequence.history) // size, size, lane.cache_model)

    patch.setattr(placement, "_keys", mutant)


def evict_without_forgetting(patch: pytest.MonkeyPatch) -> None:
    """A block is given out again and still answers to its old key."""
    patch.setattr(BlockPool, "forget", lambda pool, block_id: None)


def fork_before_the_parent_has_its_tail(patch: pytest.MonkeyPatch) -> None:
    """A fork of a fork copies a block that is itself still to be copied."""
    fork = placement._forked

    def mutant(sequence: Sequence, lane: Lane, prefix: Prefix, parent: Sequence | None) -> Prefix:
        stay = parent.stay if parent is not None else None
        if stay is not None and stay.num_settled == len(sequence.history) - 1:
            stay._settled += 1
            try:
                return fork(sequence, lane, prefix, parent)
            finally:
                stay._settled -= 1
        return fork(sequence, lane, prefix, parent)

    patch.setattr(placement, "_forked", mutant)


def return_the_copied_block_at_once(patch: pytest.MonkeyPatch) -> None:
    """The source of a copy may be given away before the step that copies it has completed (E1)."""
    dispatch = planning._dispatch

    def mutant(lane: Lane, config: SchedulerConfig, step: StepInFlight, sitting_out: dict[Stay, None]) -> object:
        plan = dispatch(lane, config, step, sitting_out)
        lane.return_borrowed(step.borrowed)
        step.borrowed = []
        return plan

    patch.setattr(planning, "_dispatch", mutant)
