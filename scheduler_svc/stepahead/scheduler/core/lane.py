"""A lane: the core's view of one worker. Its pools, its rows and its steps in flight.

Lanes never wait for each other. The lane keeps books; deciding is `scheduler.py`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sequence_
from itertools import islice, takewhile

from stepahead.scheduler.core.block_pool import BlockPool, FencedPool
from stepahead.scheduler.core.config import LaneConfig
from stepahead.scheduler.core.decode_rows import DecodeRows
from stepahead.scheduler.core.ids import NO_STEP, BlockId, BlockKey, Incarnation, LaneId, SlotId, StepId
from stepahead.scheduler.core.plan import StepPlan
from stepahead.scheduler.core.prefix import Prefix
from stepahead.scheduler.core.sequence import DecodeClock, Sequence, Stay
from stepahead.scheduler.core.step_in_flight import StepInFlight
from stepahead.scheduler.core.window_groups import LaneWindows

Bookings = dict[int, dict[Stay, None]]
"""Members of the decode set by the tick after which their stride does not simply go on."""


class Lane:
    """Books of one worker."""

    __slots__ = (
        "_rows",
        "being_prefilled",
        "blocks",
        "borders",
        "cache_model",
        "clock",
        "committed_through",
        "config",
        "crossing",
        "decoding",
        "doomed",
        "ends",
        "epoch",
        "finishing",
        "in_flight",
        "joined",
        "lane_id",
        "left_slots",
        "new_block_groups",
        "new_block_slots",
        "new_blocks",
        "next_step_id",
        "num_cache_tokens",
        "num_overrun_rows",
        "num_stale_results",
        "prefilling",
        "released",
        "room_version",
        "slots",
        "windows",
    )

    def __init__(
        self, lane_id: LaneId, config: LaneConfig, epoch: int, *, overlap_depth: int, cache_model: str | None = None
    ) -> None:
        self.lane_id = lane_id
        self.config = config
        self.epoch = epoch
        self.cache_model = cache_model
        """Goes into block keys; None: nothing is cached."""
        self.blocks = BlockPool(config.num_blocks)
        """Of the layers that see everything."""
        self.windows = LaneWindows(config, overlap_depth) if config.windows else None
        self.num_cache_tokens = config.num_cache_tokens(overlap_depth)
        """Positions the longest sequence may have, alone."""
        self.being_prefilled: dict[BlockKey, Stay] = {}
        """Keys of prompt blocks that a live stay will publish, and which."""
        self.slots: FencedPool[SlotId] = FencedPool(SlotId(i) for i in range(config.num_slots))
        self.prefilling: list[Stay] = []
        """Stays that still feed known tokens, in order of admission."""
        self.decoding: dict[Stay, None] = {}
        """The decode set: one token per step each, in joining order (the worker keeps the same set)."""
        self.clock = DecodeClock()
        self.crossing: list[Stay] = []
        """Members whose next position needs a block."""
        self.borders: Bookings = {}
        """Members by the tick after which they need a block."""
        self.ends: Bookings = {}
        """Members by the tick after which their last possible output is in flight."""
        self._rows: DecodeRows | None = None
        self.finishing: dict[Stay, None] = {}
        """Stays whose last possible output is in flight: no more rows, their blocks are coming back."""
        self.in_flight: deque[StepInFlight] = deque()
        self.doomed = False
        """A step failed as a whole: the steps in flight behind it fail too, so nothing is planned behind them."""
        self.next_step_id = StepId(1)
        self.committed_through = NO_STEP
        # Deltas for the next plan with rows; a release never causes a plan of its own.
        self.released: list[Stay] = []
        self.joined: list[Stay] = []
        self.left_slots: list[SlotId] = []
        self.new_block_slots: list[SlotId] = []
        self.new_blocks: list[BlockId] = []
        self.new_block_groups: list[int] = []
        self.room_version = 0
        """Changes whenever somebody could find a place who did not before."""
        self.num_overrun_rows = 0
        self.num_stale_results = 0

    @property
    def num_running(self) -> int:
        """Sequences that get rows; retiring ones do not count against admission (rule E10)."""
        return len(self.prefilling) + len(self.decoding)

    def admit(self, sequence: Sequence, incarnation: Incarnation, prefix: Prefix) -> Stay:
        """Gives the sequence a slot, the cached blocks and new ones for the rest of its history.

        The caller has checked that there are enough.
        """
        slots = self.slots.take(1)
        num_blocks = self.config.num_blocks_for(len(sequence.history))
        self.blocks.share(prefix.cached)  # first, lest `take` evict one of them
        if prefix.copy_from is not None:
            self.blocks.share([prefix.copy_from])  # its owner may end before the copy is made
        fresh = self.blocks.take(num_blocks - len(prefix.cached) if self.config.num_blocks else 0)
        assert slots is not None, "admitted without a free slot"
        assert fresh is not None, "admitted without free blocks"
        stay = Stay(
            sequence,
            lane_id=self.lane_id,
            clock=self.clock,
            incarnation=incarnation,
            slot=slots[0],
            block_ids=prefix.cached + fresh,
            windows=self.windows.open_tables(prefix, num_blocks) if self.windows else [],
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            prefix=prefix,
        )
        sequence.stay = stay
        self.prefilling.append(stay)
        return stay

    def announce_prefill(self, stay: Stay, keys: Sequence_[BlockKey]) -> None:
        """The stay is going to publish blocks with these keys."""
        stay.pending_keys = keys
        for key in keys:
            self.being_prefilled.setdefault(key, stay)

    def publish_settled(self, stay: Stay) -> None:
        """Full blocks whose every position is settled become visible for sharing (rules H1, H2)."""
        if self.cache_model is None or not stay.may_publish:
            return
        size = self.config.block_size
        num_blocks = min(stay.num_settled, len(stay.sequence.history)) // size
        if num_blocks <= stay.num_published_blocks:
            return
        keys = stay.sequence.block_keys(num_blocks, size, self.cache_model)
        for index in range(stay.num_published_blocks, num_blocks):
            key = keys[index]
            if stay.block_ids:
                self.blocks.publish(stay.block_ids[index], key)
            if self.being_prefilled.get(key) is stay:
                del self.being_prefilled[key]
        if self.windows:
            self.windows.publish(stay, keys, stay.num_published_blocks)
        stay.num_published_blocks = num_blocks
        self.room_version += 1

    def distrust(self, stay: Stay) -> None:
        """What the stay wrote may be poisoned (rules H3, J10): nobody may share it."""
        for block_id in stay.block_ids[stay.num_cached_blocks :]:
            self.blocks.forget(block_id)
        if self.windows and self.cache_model is not None:
            num_keys = len(stay.sequence.history) // self.config.block_size
            keys = stay.sequence.block_keys(num_keys, self.config.block_size, self.cache_model)
            first = stay.num_cached_blocks if stay.replay is None else stay.replay.start // self.config.block_size
            self.windows.distrust(keys[first:])
        stay.num_published_blocks = stay.num_blocks

    def extend(self, stays: list[Stay]) -> bool:
        """Adds one block to the tables of each member, which stands at their end; False if there are too few."""
        if self.windows:
            has_blocks = not self.config.num_blocks or self.blocks.num_available >= len(stays)
            if not has_blocks or not self.windows.reserve_next(stays):
                return False
        block_ids = self.blocks.take(len(stays) if self.config.num_blocks else 0)
        if block_ids is None:
            return False
        # Everybody's next border is a block away: the same tick for all of them.
        tick = self.clock.dispatched + self.config.block_size
        if self.config.num_blocks:
            for stay, block_id in zip(stays, block_ids, strict=True):
                stay.block_ids.append(block_id)
                stay.border_tick = tick
        else:
            for stay in stays:
                stay.num_window_blocks += 1
                stay.border_tick = tick
        self.borders.setdefault(tick, {}).update(dict.fromkeys(stays))
        self.new_block_slots += [stay.slot for stay in stays[: len(block_ids)]]
        self.new_blocks += block_ids
        if self.windows:
            self.new_block_groups += [0] * len(block_ids)
            for stay in stays:
                self.grow_windows(stay, stay.capacity)
        return True

    def grow_windows(self, stay: Stay, num_tokens: int) -> None:
        """Extends a stay's window tables over its first `num_tokens` positions, within what it has reserved."""
        assert self.windows is not None, "there are no windows"
        added = self.windows.grow(stay, num_tokens)
        if stay.announced:
            self.new_block_slots += [stay.slot] * len(added)
            self.new_block_groups += [group for group, _ in added]
            self.new_blocks += [block_id for _, block_id in added]

    @property
    def num_returning_blocks(self) -> int:
        """Blocks that come back when steps in flight commit, without taking anybody's place (rule E7).

        Of the pool that has least of them, where several have too few.
        """
        returning = self.blocks.num_quarantined + sum(len(stay.block_ids) for stay in self.finishing)
        if self.windows:
            in_windows = self.windows.num_returning([*self.prefilling, *self.decoding])
            if in_windows is not None:
                others_lack = self.config.num_blocks and not self.blocks.num_available
                return min(in_windows, returning) if others_lack else in_windows
        return returning

    @property
    def block_pools(self) -> list[BlockPool]:
        """The pools of all KV groups, that of the layers that see everything first (it may be empty)."""
        return [self.blocks, *(group.pool for group in self.windows.groups)] if self.windows else [self.blocks]

    @property
    def rows(self) -> DecodeRows:
        """The decode set as columns; the same object until the set changes."""
        if self._rows is None:
            self._rows = DecodeRows(self.decoding)
        return self._rows

    def tick(self, step: StepInFlight) -> None:
        """A step with decode rows was dispatched: the whole set advances, and whoever is due gets attention."""
        clock = self.clock
        clock.dispatched += 1
        clock.last_step = step.step_id
        tick = clock.dispatched
        for stay in list(self.ends.get(tick, ())):
            step.last_outputs.append(stay)
            self._leave_decode_set(stay)
            self.left_slots.append(stay.slot)
            self.finishing[stay] = None
        self.crossing += self.borders.pop(tick, ())

    def _book(self, stay: Stay, position: int, tick: int) -> None:
        """Books when the member, at `position` after `tick`, is at the end of its block table or its answer."""
        stay.end_tick = tick + stay.feed_limit - position
        self.ends.setdefault(stay.end_tick, {})[stay] = None
        if position >= stay.capacity:
            self.crossing.append(stay)
        else:
            stay.border_tick = tick + stay.capacity - position
            self.borders.setdefault(stay.border_tick, {})[stay] = None

    def _unbook(self, stay: Stay) -> None:
        # At once: a member may leave thousands of ticks before its last output.
        for bookings, tick in ((self.ends, stay.end_tick), (self.borders, stay.border_tick)):
            booked = bookings.get(tick, {})
            booked.pop(stay, None)
            if not booked:
                bookings.pop(tick, None)
        if stay in self.crossing:
            self.crossing.remove(stay)

    def sit_out(self, stay: Stay) -> None:
        """Called before the next tick: that one does not feed this member, so everything comes a tick later."""
        self._unbook(stay)
        self._book(stay, stay.num_dispatched, self.clock.dispatched + 1)
        stay.sit_out()

    def settle_into_decode(self, stay: Stay) -> None:
        """The stay's newest known token is dispatched: from now on it feeds what it sampled, if anything."""
        self.prefilling.remove(stay)
        if stay.num_dispatched >= stay.feed_limit:
            self.finishing[stay] = None
            return
        stay.join_decode_set()
        self.decoding[stay] = None
        self._rows = None
        self.joined.append(stay)
        self._book(stay, stay.num_dispatched, self.clock.dispatched)

    def _leave_decode_set(self, stay: Stay) -> None:
        stay.leave_decode_set()
        self._unbook(stay)
        del self.decoding[stay]
        self._rows = None

    def rewind(self, stay: Stay) -> None:
        """A sampling row came back empty: feed its position again as an explicit row, once nothing is in flight."""
        if stay.rewinding:
            return
        stay.rewinding = True
        if stay.retired or stay in self.prefilling:
            return
        self._leave_rows(stay)
        # It has had its turn: before any newcomer, among its like by arrival.
        arrival = stay.sequence.arrival
        older = (other.rewinding and other.sequence.arrival < arrival for other in self.prefilling)
        self.prefilling.insert(sum(takewhile(bool, older)), stay)

    def _leave_rows(self, stay: Stay) -> None:
        """Takes the stay out of whatever gives it rows, and the worker's decode set with it."""
        if stay in self.decoding:
            self._leave_decode_set(stay)
            if stay in self.joined:
                self.joined.remove(stay)
            else:
                self.left_slots.append(stay.slot)
        elif stay in self.finishing:
            del self.finishing[stay]
        else:
            self.prefilling.remove(stay)

    def retire(self, stay: Stay) -> None:
        """No further rows. Slot and blocks come back at the fence: now, or when its last step commits."""
        assert not stay.retired, "retired twice"
        stay.retired = True
        self.publish_settled(stay)
        self._leave_rows(stay)
        self._forget_deltas(stay)
        if stay.announced:
            self.released.append(stay)
        for key in stay.pending_keys:
            if self.being_prefilled.get(key) is stay:
                del self.being_prefilled[key]
        self.room_version += 1
        self.slots.quarantine(1)
        self.blocks.quarantine(stay.block_ids)
        if self.windows:
            self.windows.quarantine(stay)
        if stay.copy_from is not None:
            self.return_borrowed([stay.copy_from])
            stay.copy_from = None
        if stay.last_step <= self.committed_through:
            self.close(stay)
            return
        index = stay.last_step - self.in_flight[0].step_id
        self.in_flight[index].fenced.append(stay)
        for step in islice(self.in_flight, index + 1):
            step.has_dead_rows = True

    def _forget_deltas(self, stay: Stay) -> None:
        """Takes back deltas that no plan has carried yet: the release says it all."""
        slot = stay.slot
        if slot in self.left_slots:
            self.left_slots.remove(slot)
        # A stay that got a block in this plan is never the victim: the youngest is asked last.
        assert slot not in self.new_block_slots, "a victim has a block of this plan"

    def return_borrowed(self, block_ids: list[BlockId]) -> None:
        """Blocks that were copied, or will not be any more."""
        self.blocks.quarantine(block_ids)
        self.blocks.release(block_ids)

    def close(self, stay: Stay) -> None:
        """The fence has passed: slot and blocks are free, tail blocks last to be given out again."""
        self.room_version += 1
        self.slots.release([stay.slot])
        self.blocks.release(stay.block_ids)
        if self.windows:
            self.windows.close(stay)
        stay.block_ids = []
        self.clock.backlog.flush()  # the sequence finds it through its stay
        stay.note_processed()
        stay.sequence.stay = None

    def dispatch(self, plan: StepPlan, step: StepInFlight) -> None:
        """Books a plan as sent: every delta it carries is gone from the lane."""
        assert plan.step_id == self.next_step_id == step.step_id
        self.in_flight.append(step)
        self.next_step_id = StepId(plan.step_id + 1)
        self.released = []
        self.joined = []
        self.left_slots = []
        self.new_block_slots = []
        self.new_blocks = []
        self.new_block_groups = []
