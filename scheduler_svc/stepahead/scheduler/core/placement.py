"""Where a waiting sequence could run: the lane that knows most of its prefix, then the one with the most room."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace

from stepahead.scheduler.core.ids import BlockId, BlockKey, LaneId, StepId
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.prefix import Prefix
from stepahead.scheduler.core.sequence import Hold, Sequence
from stepahead.scheduler.core.window_replay import choose_replay


@dataclass(frozen=True, slots=True)
class Place:
    """A lane that could take a sequence now."""

    lane: Lane
    prefix: Prefix
    missing_keys: Sequence_[BlockKey]
    """Keys of the full blocks of the history that it is going to publish."""


def find_place(sequence: Sequence, lanes: list[Lane], parent: Sequence | None) -> Place | None:
    """The best lane that has a place, a slot and blocks for the sequence's history, or None.

    Args:
        sequence: waiting, without a stay.
        lanes: that take newcomers.
        parent: the live sequence it is a fork of, if any.
    """
    best: Place | None = None
    best_rank = (-1, -1.0, -1)
    for lane in lanes:
        config = lane.config
        if (
            lane.num_running >= config.max_num_seqs
            or not lane.slots.num_free
            or sequence.max_total_tokens > config.max_model_len
            or sequence.max_total_tokens - 1 > lane.num_cache_tokens
        ):
            continue
        keys = _keys(sequence, lane)
        prefix = _find_prefix(sequence, lane, keys)
        left = _room_left(sequence, lane, prefix.cached)
        rank = (prefix.num_unfed, 1 - lane.num_running / config.max_num_seqs, left)
        if left >= 0 and rank > best_rank:
            missing = _missing_keys(keys, prefix, config.block_size)
            best, best_rank = Place(lane, _forked(sequence, lane, prefix, parent), missing), rank
    return best


def _find_prefix(sequence: Sequence, lane: Lane, keys: Sequence_[BlockKey]) -> Prefix:
    """What the lane knows of the sequence's history.

    Where windows are missing before the end of what layers that see everything know, the prefix ends earlier and
    the rest is computed again, from exact states as without a cache (rules N8, N12); or only the windows are.
    """
    cached, size = lane.blocks.find(keys), lane.config.block_size
    if lane.windows is None:
        return Prefix(cached=cached, keys=keys[: len(cached)], num_unfed=len(cached) * size)
    end = len(cached) * size
    if not lane.config.num_blocks:
        end = min(sequence.num_processed_tokens, len(sequence.history) - 1)
    num_cached = lane.windows.longest_hit(keys, len(cached) if lane.config.num_blocks else len(keys))
    replay = choose_replay(sequence.request, lane.config, end=end, num_unfed=num_cached * size)
    if replay is not None:
        return Prefix(cached=cached, keys=keys[: len(cached)], num_unfed=replay.start, replay=replay)
    return Prefix(cached=cached[:num_cached], keys=keys[:num_cached], num_unfed=num_cached * size)


def _missing_keys(keys: Sequence_[BlockKey], prefix: Prefix, block_size: int) -> Sequence_[BlockKey]:
    """Keys of blocks that the sequence writes whole; behind an approximate replay it publishes none."""
    replay = prefix.replay
    if replay is None:
        return keys[len(prefix.keys) :]
    return keys[-(-replay.end // block_size) :] if replay.is_exact else ()


def _room_left(sequence: Sequence, lane: Lane, cached: list[BlockId]) -> int:
    """Blocks that stay free if the sequence enters, of the pool that has least; negative: it cannot.

    A lane that runs others keeps a little back, so that their next blocks cost nobody's place.
    """
    config, blocks = lane.config, lane.blocks
    needed = config.num_blocks_for(len(sequence.history))
    rooms = lane.windows.rooms_left(needed) if lane.windows else []
    if config.num_blocks:
        available = blocks.num_available - blocks.num_idle_among(cached)
        rooms.append((available - (needed - len(cached)), config.num_blocks))
    return min(left - (max(1, total // 100) if lane.num_running else 0) for left, total in rooms)


def _forked(sequence: Sequence, lane: Lane, prefix: Prefix, parent: Sequence | None) -> Prefix:
    """The prefix, with all of the prompt but its last position where that can be copied from the parent.

        prompt   | full block | full block | tail ... last |      n positions
        parent   |   shared   |   shared   | its own       |
        fork     |   shared   |   shared   | copied  | fed |      starts at n - 1

    The parent may write later positions of its tail while it is copied; the fork overwrites them before it
    reads them. With window groups the tail is fed again: the parent may have dropped it.
    """
    size = lane.config.block_size
    num_cached_blocks = len(prefix.keys)
    last = len(sequence.history) - 1
    stay = parent.stay if parent is not None else None
    if (
        stay is None
        or stay.retired
        or lane.windows is not None
        or stay.lane_id != lane.lane_id
        or stay.sequence.request.prompt_token_ids != tuple(sequence.history)
        or num_cached_blocks != last // size
        or last == prefix.num_unfed
        or stay.num_settled <= last  # also says that the parent's own tail, if that is a copy, has been made
    ):
        return prefix
    return replace(prefix, num_unfed=last, copy_from=stay.block_ids[num_cached_blocks])


def _keys(sequence: Sequence, lane: Lane) -> Sequence_[BlockKey]:
    """Keys that a hit may use: at least the last position is left to compute, in a block of its own (H5)."""
    if lane.cache_model is None or sequence.request.recompute_prompt:
        return ()
    size = lane.config.block_size
    return sequence.block_keys((len(sequence.history) - 1) // size, size, lane.cache_model)


def is_held(sequence: Sequence, place: Place, max_held_steps: int) -> bool:
    """Whether it pays to wait: the next block of the prefix is being prefilled on that lane right now.

    Bounded in steps of the lane, so that a slow neighbour never holds anybody up for long.
    """
    lane = place.lane
    if not place.missing_keys or place.missing_keys[0] not in lane.being_prefilled:
        return False
    hold = sequence.hold
    if hold is None or hold.lane_id != lane.lane_id:
        until = StepId(lane.next_step_id + max_held_steps)
    else:
        until = hold.until
    sequence.hold = Hold(lane.lane_id, place.missing_keys[0], until)
    return lane.next_step_id < until


def is_still_held(hold: Hold, lanes: Mapping[LaneId, Lane]) -> bool:
    """Whether what was waited for in an earlier pass is still to come: no need to look for a place again.

    Hundreds may wait for one prefix, and every pass meets all of them.
    """
    lane = lanes.get(hold.lane_id)
    return lane is not None and hold.key in lane.being_prefilled and lane.next_step_id < hold.until
