"""A lane: the core's view of one worker. Its pools, its rows and its steps in flight.

Lanes never wait for each other. The lane keeps books; deciding is `scheduler.py`'s.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from stepahead.scheduler.core.block_pool import FencedPool
from stepahead.scheduler.core.config import LaneConfig
from stepahead.scheduler.core.ids import NO_STEP, BlockId, Incarnation, LaneId, SlotId, StepId
from stepahead.scheduler.core.plan import StepPlan
from stepahead.scheduler.core.sequence import Sequence, Stay


class StepInFlight:
    """A dispatched step: its rows in plan order, and what its completion gives back."""

    __slots__ = ("decode_rows", "explicit_rows", "fenced", "incarnations", "num_tokens", "step_id")

    def __init__(
        self,
        step_id: StepId,
        explicit_rows: list[tuple[Stay, int, bool]],
        decode_rows: list[Stay],
    ) -> None:
        self.step_id = step_id
        self.explicit_rows = explicit_rows
        """(stay, positions fed, samples)."""
        self.decode_rows = decode_rows
        """Each feeds one position and samples."""
        self.incarnations: list[Incarnation] = [stay.incarnation for stay, _, _ in explicit_rows]
        self.incarnations += [stay.incarnation for stay in decode_rows]
        self.num_tokens = sum(count for _, count, _ in explicit_rows) + len(decode_rows)
        self.fenced: list[Stay] = []
        """Retired stays whose slot and blocks come back when this step commits."""


class Lane:
    """Books of one worker."""

    __slots__ = (
        "blocks",
        "committed_through",
        "config",
        "decoding",
        "doomed",
        "epoch",
        "finishing",
        "in_flight",
        "joined",
        "lane_id",
        "left_slots",
        "new_block_slots",
        "new_blocks",
        "next_step_id",
        "num_overrun_rows",
        "num_stale_results",
        "prefilling",
        "released",
        "slots",
    )

    def __init__(self, lane_id: LaneId, config: LaneConfig, epoch: int) -> None:
        self.lane_id = lane_id
        self.config = config
        self.epoch = epoch
        self.blocks: FencedPool[BlockId] = FencedPool(BlockId(i) for i in range(config.num_blocks))
        self.slots: FencedPool[SlotId] = FencedPool(SlotId(i) for i in range(config.num_slots))
        self.prefilling: list[Stay] = []
        """Stays that still feed known tokens, in order of admission."""
        self.decoding: dict[Stay, None] = {}
        """The decode set: one token per step each, in joining order (the worker keeps the same set)."""
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
        self.num_overrun_rows = 0
        self.num_stale_results = 0

    @property
    def num_running(self) -> int:
        """Sequences that get rows; retiring ones do not count against admission (rule E10)."""
        return len(self.prefilling) + len(self.decoding)

    def admit(self, sequence: Sequence, incarnation: Incarnation) -> Stay:
        """Gives the sequence a slot and blocks for its whole history. The caller has checked that both exist."""
        slots = self.slots.take(1)
        block_ids = self.blocks.take(self.config.num_blocks_for(len(sequence.history)))
        assert slots is not None, "admitted without a free slot"
        assert block_ids is not None, "admitted without free blocks"
        stay = Stay(
            sequence,
            lane_id=self.lane_id,
            incarnation=incarnation,
            slot=slots[0],
            block_ids=block_ids,
            block_size=self.config.block_size,
        )
        sequence.stay = stay
        self.prefilling.append(stay)
        return stay

    def extend(self, stay: Stay) -> bool:
        """Adds one block to a stay's table; False if none is free."""
        block_ids = self.blocks.take(1)
        if block_ids is None:
            return False
        stay.block_ids += block_ids
        stay.capacity += self.config.block_size
        self.new_block_slots.append(stay.slot)
        self.new_blocks += block_ids
        return True

    @property
    def num_returning_blocks(self) -> int:
        """Blocks that come back when steps in flight commit, without taking anybody's place (rule E7)."""
        return self.blocks.num_quarantined + sum(len(stay.block_ids) for stay in self.finishing)

    def settle_into_decode(self, stay: Stay) -> None:
        """The stay's newest known token is dispatched: from now on it feeds what it sampled, if anything."""
        self.prefilling.remove(stay)
        if stay.num_dispatched >= stay.feed_limit:
            self.finishing[stay] = None
        else:
            self.decoding[stay] = None
            self.joined.append(stay)

    def leave_decode_set(self, stay: Stay) -> None:
        """The stay's last possible output was dispatched: it keeps its slot and gets no more rows."""
        del self.decoding[stay]
        self.left_slots.append(stay.slot)
        self.finishing[stay] = None

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
        if stay in self.joined:
            self.joined.remove(stay)
            del self.decoding[stay]
        elif stay in self.decoding:
            del self.decoding[stay]
            self.left_slots.append(stay.slot)
        elif stay in self.finishing:
            del self.finishing[stay]
        else:
            self.prefilling.remove(stay)

    def retire(self, stay: Stay) -> None:
        """No further rows. Slot and blocks come back at the fence: now, or when its last step commits."""
        assert not stay.retired, "retired twice"
        stay.retired = True
        self._leave_rows(stay)
        self._forget_deltas(stay)
        if stay.announced:
            self.released.append(stay)
        self.slots.quarantine(1)
        self.blocks.quarantine(len(stay.block_ids))
        if stay.last_step <= self.committed_through:
            self.close(stay)
        else:
            index = stay.last_step - self.in_flight[0].step_id
            self.in_flight[index].fenced.append(stay)

    def _forget_deltas(self, stay: Stay) -> None:
        """Takes back deltas that no plan has carried yet: the release says it all."""
        slot = stay.slot
        if slot in self.left_slots:
            self.left_slots.remove(slot)
        # A stay that got a block in this plan is never the victim: the youngest is asked last.
        assert slot not in self.new_block_slots, "a victim has a block of this plan"

    def close(self, stay: Stay) -> None:
        """The fence has passed: slot and blocks are free, tail blocks last to be given out again."""
        self.slots.release([stay.slot])
        self.blocks.release(stay.block_ids)
        stay.block_ids = []
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
