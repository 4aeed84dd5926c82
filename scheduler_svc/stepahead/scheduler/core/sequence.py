"""The mutable progress of a request, in two parts: what it has said, and where it stands on a device.

Three boundaries, never one counter. For a stay with history length H:

    positions   0 ............... P ............... S ................ H + U - 1
                |<-- settled ---->|<-- in flight -->|<-- to be fed --->|
                   KV is written     dispatched, not   known tokens of a prompt, or the one
                                     committed         token the previous step samples

    H  emitted      len(history): prompt + committed outputs; moves at commit only
    S  dispatched   positions handed to the worker; moves at dispatch, back only on a rollback
    P  settled      positions whose step has completed; moves at commit only
    U  placeholders outputs that are scheduled and unknown

There are no phases: a stay always has H + U - S tokens to feed, and a row that feeds the last of them samples.
A long prompt chunk, the last chunk and a decode token are the same arithmetic. Once the sampling row is
dispatched S = H + U - 1 holds through every dispatch and commit (rule A2); settled and idle it reads H = P + 1
(rule A1): the newest token is never in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

from stepahead.scheduler.core.ids import NO_STEP, BlockId, BlockKey, Incarnation, LaneId, SlotId, StepId
from stepahead.scheduler.core.prefix import Prefix
from stepahead.scheduler.core.prefix_cache import KeyChain
from stepahead.scheduler.core.request import (
    TRANSITIONS,
    LifecycleEvent,
    Request,
    RequestStatus,
)
from stepahead.scheduler.core.token_backlog import TokenBacklog
from stepahead.scheduler.core.window_table import WindowTable


@dataclass(frozen=True, slots=True)
class Hold:
    """Waiting for the next block of a prefix, which somebody prefills right now."""

    lane_id: LaneId
    key: BlockKey
    """Of that block."""
    until: StepId
    """The lane's step from which on it is not waited for any more."""


class Sequence:
    """The history and status of one request. Owned by the scheduler, lives from add to finish."""

    __slots__ = (
        "_chain",
        "_chain_block_size",
        "_history",
        "arrival",
        "hold",
        "max_total_tokens",
        "num_cached_tokens",
        "num_charged_outputs",
        "num_preemptions",
        "num_processed_tokens",
        "num_prompt_tokens",
        "queued_at",
        "request",
        "status",
        "stay",
        "times_passed",
    )

    def __init__(self, request: Request, arrival: int, max_total_tokens: int) -> None:
        self.request = request
        self.arrival = arrival
        """Position in the order of acceptance; older wins."""
        self._history: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        """Largest history: min(prompt + max_tokens, max_model_len)."""
        self.status = RequestStatus.WAITING
        self.stay: Stay | None = None
        """The current stay; after a preemption the old one until its last dispatched step commits."""
        self.times_passed = 0
        self.queued_at = 0
        """Admissions of others before it was queued, for its age."""
        self.num_charged_outputs = 0
        self.num_preemptions = 0
        self.num_processed_tokens = 0
        """Positions that have settled in one of its former stays."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission (rule H9)."""
        self.hold: Hold | None = None
        """The newest one; over once its block is there or its step has come."""
        self._chain: KeyChain | None = None
        self._chain_block_size = 0

    @property
    def history(self) -> list[int]:
        """H as tokens: the prompt, then the committed outputs."""
        if self.stay is not None:
            self.stay.clock.backlog.flush()
        return self._history

    @property
    def unflushed_history(self) -> list[int]:
        """The list behind `history`, for columns: it may lack what the lane's backlog holds."""
        return self._history

    @property
    def rank(self) -> tuple[int, int]:
        """Order among the running: smaller keeps its place longer. Priority, then arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def num_output_tokens(self) -> int:
        """Committed outputs."""
        return len(self.history) - self.num_prompt_tokens

    def block_keys(self, num_blocks: int, block_size: int, model: str) -> Sequence_[BlockKey]:
        """Keys of the first full blocks of the history."""
        if self._chain is None or self._chain_block_size != block_size:
            self._chain_block_size = block_size
            self._chain = KeyChain(self.history, block_size=block_size, model=model, salt=self.request.cache_salt)
        return self._chain.first(num_blocks)

    def apply(self, event: LifecycleEvent) -> None:
        """Moves the status by the transition table; an illegal event raises and changes nothing."""
        target = TRANSITIONS[self.status].get(event)
        if target is None:
            raise AssertionError(f"{event} is illegal for a {self.status} sequence")
        self.status = target


NO_TICK = -1
"""No tick is meant."""


class DecodeClock:
    """The common stride of a lane's decode set.

    Members of the set advance together, one position per step with decode rows. So a steady step moves two
    numbers here, whatever the width of the batch, and a member's counters are read relative to them:

        joined at tick j            now
        |------ ticks dispatched --->|      S = own + (dispatched - j) - ticks sat out
        |---- ticks settled --->|           P = own + (settled - j)    - settled ticks sat out
    """

    __slots__ = ("backlog", "dispatched", "last_step", "settled")

    def __init__(self) -> None:
        self.dispatched = 0
        """Ticks: dispatched steps with decode rows."""
        self.settled = 0
        """Ticks whose step has committed; they commit in order."""
        self.last_step: StepId = NO_STEP
        """The step of the newest tick."""
        self.backlog = TokenBacklog()
        """Tokens of settled ticks that the members' histories lack."""


class Stay:
    """One stay of a sequence in a slot of a lane: what an incarnation number names.

    Ends in two moments: *retired* (no further row is planned: finished, aborted or preempted) and *closed*
    (the last dispatched step that names it has committed; slot and blocks are free again).
    """

    __slots__ = (
        "_dispatched",
        "_joined_at",
        "_last_step",
        "_left_at",
        "_placeholders",
        "_sat_out",
        "_settled",
        "announced",
        "block_ids",
        "block_size",
        "border_tick",
        "clock",
        "copy_from",
        "end_tick",
        "feed_limit",
        "incarnation",
        "lane_id",
        "num_cached_blocks",
        "num_published_blocks",
        "num_window_blocks",
        "pending_keys",
        "replay",
        "retired",
        "rewinding",
        "sequence",
        "slot",
        "windows",
    )

    def __init__(  # noqa: PLR0913 - made in one place, Lane.admit, and every value is a different thing
        self,
        sequence: Sequence,
        *,
        lane_id: LaneId,
        clock: DecodeClock,
        incarnation: Incarnation,
        slot: SlotId,
        block_ids: list[BlockId],
        windows: list[WindowTable],
        num_blocks: int,
        block_size: int,
        prefix: Prefix,
    ) -> None:
        self.sequence = sequence
        self.lane_id = lane_id
        self.incarnation = incarnation
        self.slot = slot
        self.block_ids = block_ids
        """The table of the layers that see everything; empty if there are none."""
        self.windows = windows
        """A table per window group; while a history is fed they may be shorter than `num_blocks`."""
        self.num_window_blocks = num_blocks
        """Where no layer sees everything: entries that the window tables are meant to have."""
        self.block_size = block_size
        self.feed_limit = sequence.max_total_tokens - 1
        """Exclusive bound of positions ever fed: the last output is never fed, so a predictable end costs no
        wasted row (rule D2) and no position reaches max_model_len (rule A6)."""
        self.announced = False
        """Whether a plan has carried the admission."""
        self.retired = False
        self.rewinding = False
        """A sampling row came back empty: rows in flight are holes; feed again once nothing is in flight."""
        self.replay = prefix.replay
        """Where its window layers alone are computed again before it goes on."""
        self.num_cached_blocks = len(prefix.keys)
        """Blocks at the front of the table that were found in the cache: shared, never written."""
        self.num_published_blocks = len(prefix.keys)
        """Blocks at the front of the table whose content is known by a key."""
        self.pending_keys: Sequence_[BlockKey] = ()
        """Keys of prompt blocks that it is going to publish."""
        self.border_tick = NO_TICK
        """After which tick it stands at the end of its block table; see Lane.book_border."""
        self.end_tick = NO_TICK
        """After which tick its last possible output is in flight."""
        self.clock = clock
        self.copy_from = prefix.copy_from
        """A fork's tail: the block whose copy is the first one of its own; until a plan has carried the copy."""
        self._dispatched = prefix.num_unfed
        self._settled = prefix.num_unfed
        self._placeholders = 0
        self._last_step: StepId = NO_STEP
        self._joined_at: int | None = None
        self._left_at: int | None = None
        self._sat_out: list[int] = []

    # ---------------------------------------------------------------------------------------- counters

    @property
    def num_blocks(self) -> int:
        """Entries of its block tables, null ones included."""
        return len(self.block_ids) or self.num_window_blocks

    @property
    def capacity(self) -> int:
        """Positions the block tables are meant to cover."""
        return self.num_blocks * self.block_size

    @property
    def num_dispatched(self) -> int:
        """S: positions handed to the worker."""
        return self._dispatched + self._ticks_dispatched

    @num_dispatched.setter
    def num_dispatched(self, value: int) -> None:
        self._dispatched += value - self.num_dispatched

    @property
    def num_settled(self) -> int:
        """P: positions whose step has completed."""
        return self._settled + self._ticks_settled

    @num_settled.setter
    def num_settled(self, value: int) -> None:
        self._settled += value - self.num_settled

    @property
    def num_placeholders(self) -> int:
        """U: outputs that are scheduled and unknown."""
        return self._placeholders + self._ticks_dispatched - self._ticks_settled

    @num_placeholders.setter
    def num_placeholders(self, value: int) -> None:
        self._placeholders += value - self.num_placeholders

    @property
    def num_in_flight(self) -> int:
        """F: positions dispatched and not committed."""
        return self.num_dispatched - self.num_settled

    @property
    def num_to_feed(self) -> int:
        """Tokens that may be fed now: known ones, or the one that the previous step samples."""
        return len(self.sequence.history) + self.num_placeholders - self.num_dispatched

    @property
    def num_to_replay(self) -> int:
        """Positions that a replay still has to feed: in rows of their own."""
        return 0 if self.replay is None else max(0, self.replay.end - self.num_dispatched)

    @property
    def may_publish(self) -> bool:
        """Whether what it writes may be shared: never behind an approximate replay (rule N9)."""
        return self.replay is None or self.replay.is_exact

    def note_processed(self) -> None:
        """The stay is over, as far as its steps have committed."""
        self.sequence.num_processed_tokens = max(self.sequence.num_processed_tokens, self.num_settled)

    @property
    def is_described(self) -> bool:
        """Whether what it feeds next comes back with log probabilities of its prompt."""
        sequence = self.sequence
        return sequence.request.recompute_prompt and self.num_dispatched < sequence.num_prompt_tokens

    @property
    def last_step(self) -> StepId:
        """Fence: newest dispatched step that may name this stay."""
        if self._joined_at is not None and self._left_at is None:
            return max(self._last_step, self.clock.last_step)
        return self._last_step

    @last_step.setter
    def last_step(self, value: StepId) -> None:
        self._last_step = value

    # ---------------------------------------------------------------------------------------- decode set

    def join_decode_set(self) -> None:
        """From the next tick on, every tick feeds one position and samples."""
        if self._joined_at is not None:
            # It was a member before: what it did then is settled, and becomes its own.
            ticks = self._ticks_dispatched
            assert ticks == self._ticks_settled, "joins again with old rows in flight"
            self._dispatched += ticks
            self._settled += ticks
        self._joined_at = self.clock.dispatched
        self._left_at = None
        self._sat_out = []

    def leave_decode_set(self) -> None:
        """No tick feeds it any more; those dispatched still settle."""
        self._last_step = self.last_step
        self._left_at = self.clock.dispatched

    def sit_out(self) -> None:
        """Called before the next tick: that one does not feed this member."""
        self._sat_out.append(self.clock.dispatched)

    @property
    def _ticks_dispatched(self) -> int:
        if self._joined_at is None:
            return 0
        end = self.clock.dispatched if self._left_at is None else self._left_at
        return end - self._joined_at - len(self._sat_out)

    @property
    def _ticks_settled(self) -> int:
        if self._joined_at is None:
            return 0
        settled = self.clock.settled
        end = settled if self._left_at is None else min(settled, self._left_at)
        if end <= self._joined_at:
            return 0
        return end - self._joined_at - sum(tick < settled for tick in self._sat_out)
