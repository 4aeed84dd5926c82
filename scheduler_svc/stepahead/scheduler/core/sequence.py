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

from stepahead.scheduler.core.ids import NO_STEP, BlockId, Incarnation, LaneId, SlotId, StepId
from stepahead.scheduler.core.request import (
    TRANSITIONS,
    LifecycleEvent,
    Request,
    RequestStatus,
)


class Sequence:
    """The history and status of one request. Owned by the scheduler, lives from add to finish."""

    __slots__ = (
        "arrival",
        "history",
        "max_total_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "request",
        "status",
        "stay",
        "times_passed",
    )

    def __init__(self, request: Request, arrival: int, max_total_tokens: int) -> None:
        self.request = request
        self.arrival = arrival
        """Position in the order of acceptance; older wins."""
        self.history: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        """Largest history: min(prompt + max_tokens, max_model_len)."""
        self.status = RequestStatus.WAITING
        self.stay: Stay | None = None
        """The current stay; after a preemption the old one until its last dispatched step commits."""
        self.times_passed = 0
        self.num_preemptions = 0

    @property
    def num_output_tokens(self) -> int:
        """Committed outputs."""
        return len(self.history) - self.num_prompt_tokens

    def apply(self, event: LifecycleEvent) -> None:
        """Moves the status by the transition table; an illegal event raises and changes nothing."""
        target = TRANSITIONS[self.status].get(event)
        if target is None:
            raise AssertionError(f"{event} is illegal for a {self.status} sequence")
        self.status = target


class Stay:
    """One stay of a sequence in a slot of a lane: what an incarnation number names.

    Ends in two moments: *retired* (no further row is planned: finished, aborted or preempted) and *closed*
    (the last dispatched step that names it has committed; slot and blocks are free again).
    """

    __slots__ = (
        "announced",
        "block_ids",
        "capacity",
        "feed_limit",
        "incarnation",
        "lane_id",
        "last_step",
        "num_dispatched",
        "num_placeholders",
        "num_settled",
        "retired",
        "rewinding",
        "sequence",
        "slot",
    )

    def __init__(
        self,
        sequence: Sequence,
        *,
        lane_id: LaneId,
        incarnation: Incarnation,
        slot: SlotId,
        block_ids: list[BlockId],
        block_size: int,
    ) -> None:
        self.sequence = sequence
        self.lane_id = lane_id
        self.incarnation = incarnation
        self.slot = slot
        self.block_ids = block_ids
        self.capacity = len(block_ids) * block_size
        """Positions the block table covers."""
        self.feed_limit = sequence.max_total_tokens - 1
        """Exclusive bound of positions ever fed: the last output is never fed, so a predictable end costs no
        wasted row (rule D2) and no position reaches max_model_len (rule A6)."""
        self.num_dispatched = 0
        self.num_settled = 0
        self.num_placeholders = 0
        self.last_step: StepId = NO_STEP
        """Fence: newest dispatched step that names this stay."""
        self.announced = False
        """Whether a plan has carried the admission."""
        self.retired = False
        self.rewinding = False
        """A sampling row came back empty: rows in flight are holes; feed again once nothing is in flight."""

    @property
    def num_in_flight(self) -> int:
        """F: positions dispatched and not committed."""
        return self.num_dispatched - self.num_settled

    @property
    def num_to_feed(self) -> int:
        """Tokens that may be fed now: known ones, or the one that the previous step samples."""
        return len(self.sequence.history) + self.num_placeholders - self.num_dispatched
