"""The scheduler: who runs, where, and in which step.

Theory of operation. Two kinds of facts come in: what clients want (`add_request`, `abort`, `finish_at`,
`expire`) and what lanes report (`open_lane`, `commit`, `fail_step`, `lose_lane`). One kind of decision goes
out: `plan(lane)`, the next step of a lane, which may be asked for while D steps of that lane are still in
flight. A plan depends on how many tokens are in flight, never on which (rule B8). Nothing here reads a clock or
draws a number, so the same calls give the same plans: a recorded run replays exactly.

An abort or a stop string is applied the moment it is told; the slot and the blocks follow at the fence
(`block_pool.py`). Every accepted request ends in exactly one `Finished` (rule D8).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import islice

from stepahead.scheduler.core.committing import commit_step, fail_step
from stepahead.scheduler.core.config import Batching, LaneConfig, Ordering, SchedulerConfig
from stepahead.scheduler.core.errors import QueueFull, RequestInfeasible, UnknownLane
from stepahead.scheduler.core.events import (
    Admitted,
    CommitOutcome,
    Finished,
    GateRow,
    PlanOutcome,
    Preempted,
)
from stepahead.scheduler.core.fair_share import FairShare
from stepahead.scheduler.core.ids import Incarnation, LaneId, RequestKey, StepId
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.placement import Place, find_place, is_held, is_still_held
from stepahead.scheduler.core.plan import StepResult
from stepahead.scheduler.core.planning import build_plan, is_window_open, make_room
from stepahead.scheduler.core.request import (
    FinishReason,
    LifecycleEvent,
    Request,
    RequestStatus,
)
from stepahead.scheduler.core.sequence import Sequence, Stay
from stepahead.scheduler.core.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Totals:
    """Counters since the scheduler was made."""

    output_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt and recomputed tokens fed by explicit rows."""
    cached_tokens: int = 0
    """Positions that were found in the prefix cache instead of being fed."""
    preemptions: int = 0
    window_replays: int = 0
    """Admissions that computed the states of window layers again alone."""
    approximate_replays: int = 0
    """Those among them from fewer positions than exact states take."""
    stale_results: int = 0


class Scheduler:
    """Requests, the waiting queue and the lanes. Not thread-safe; every call is synchronous and bounded."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.totals = Totals()
        self.lanes: dict[LaneId, Lane] = {}
        self.sequences: dict[RequestKey, Sequence] = {}
        """Every request that was accepted and has not ended."""
        self.shares = FairShare()
        self.waiting = WaitingQueue(config.ordering, ageing_admissions=config.ageing_admissions, shares=self.shares)
        self._arrivals = 0
        self._incarnations = 0
        self._no_room: tuple[int, ...] | None = None
        """State of the queue and the lanes when the last pass found no place for anybody."""
        self._deadlines: list[tuple[int, int, RequestKey]] = []

    # -------------------------------------------------------------------------------------------- lanes

    def open_lane(self, lane_id: LaneId, config: LaneConfig, epoch: int) -> None:
        """Adds a worker with an empty batch and cache. `epoch` must differ from every earlier one of the lane."""
        assert lane_id not in self.lanes, "the lane is open"
        cache_model = self.config.model if self.config.prefix_caching else None
        depth = self.config.overlap_depth
        self.lanes[lane_id] = Lane(lane_id, config, epoch, overlap_depth=depth, cache_model=cache_model)
        self._no_room = None  # a new lane counts its changes from 0, as the one before it did

    def lose_lane(self, lane_id: LaneId) -> tuple[Preempted, ...]:
        """The worker's state is void. Its sequences wait again, at their old place, with their whole history.

        Tokens in flight are lost and will be sampled again: every draw depends on the output index only.
        """
        lane = self.lanes.pop(lane_id, None)
        if lane is None:
            raise UnknownLane(f"lane {lane_id}")
        lane.clock.backlog.flush()
        lost: dict[Stay, None] = dict.fromkeys([*lane.prefilling, *lane.decoding, *lane.finishing])
        preempted: list[Preempted] = []
        for stay in lost:
            stay.retired = True
            stay.note_processed()
            stay.sequence.stay = None
            preempted.append(self._preempt(stay.sequence))
        for step in lane.in_flight:
            for stay in step.fenced:
                stay.note_processed()
                stay.sequence.stay = None
        return tuple(preempted)

    def _lane(self, lane_id: LaneId) -> Lane:
        lane = self.lanes.get(lane_id)
        if lane is None:
            raise UnknownLane(f"lane {lane_id}")
        return lane

    # -------------------------------------------------------------------------------------------- requests

    def add_request(self, request: Request) -> None:
        """As `add_requests`, for one."""
        self.add_requests((request,))

    def add_requests(self, requests: Sequence_[Request]) -> None:
        """Accepts requests, all or none: each will end in exactly one Finished.

        Raises:
            RequestInfeasible: no lane could run it even alone (rules G9, V3).
            QueueFull: too many are waiting.
            UnknownLane: there is no lane at all, so nothing is known about sizes.
        """
        if not self.lanes:
            raise UnknownLane("no lane is open")
        lengths = [self._max_total_tokens(request) for request in requests]
        if self.config.max_waiting is not None and len(self.waiting) + len(requests) > self.config.max_waiting:
            raise QueueFull(len(self.waiting))
        for request, max_total_tokens in zip(requests, lengths, strict=True):
            self._enqueue(request, max_total_tokens)

    def _max_total_tokens(self, request: Request) -> int:
        """Prompt and outputs at most. Raises RequestInfeasible."""
        assert request.key not in self.sequences, "request keys are unique"
        configs = [lane.config for lane in self.lanes.values()]
        max_model_len = min(config.max_model_len for config in configs)
        num_prompt_tokens = len(request.prompt_token_ids)
        max_total_tokens = min(num_prompt_tokens + request.max_tokens, max_model_len)
        available = max(lane.num_cache_tokens for lane in self.lanes.values())
        if num_prompt_tokens >= max_model_len:
            raise RequestInfeasible(num_prompt_tokens + 1, max_model_len)
        if max_total_tokens - 1 > available:
            raise RequestInfeasible(max_total_tokens - 1, available)
        return max_total_tokens

    def _enqueue(self, request: Request, max_total_tokens: int) -> None:
        sequence = Sequence(request, self._arrivals, max_total_tokens)
        self.shares.enter(request.tenant)
        self._arrivals += 1
        self.sequences[request.key] = sequence
        self.waiting.push(sequence)
        for deadline_ns in (request.deadline_ns, request.queue_deadline_ns):
            if deadline_ns is not None:
                heapq.heappush(self._deadlines, (deadline_ns, sequence.arrival, request.key))

    def abort(self, key: RequestKey, reason: FinishReason = FinishReason.CANCELLED) -> Finished | None:
        """Ends a request now; a token in flight will not be exposed (rule F2). None if it is not live (F3)."""
        sequence = self.sequences.get(key)
        if sequence is None:
            return None
        finished = Finished(key, reason, sequence.num_output_tokens)
        self._finish(sequence, finished)
        return finished

    def finish_at(self, key: RequestKey, num_output_tokens: int) -> Finished | None:
        """Ends a request with STOP at an output the shell recognised (a stop string). None if it is not live.

        Later outputs are cut from the history: they were never delivered (rule K6).
        """
        sequence = self.sequences.get(key)
        if sequence is None:
            return None
        assert 0 < num_output_tokens <= sequence.num_output_tokens, "stop beyond the history"
        del sequence.history[sequence.num_prompt_tokens + num_output_tokens :]
        finished = Finished(key, FinishReason.STOP, num_output_tokens)
        self._finish(sequence, finished)
        return finished

    def expire(self, now_ns: int) -> tuple[Finished, ...]:
        """Ends every request whose deadline is at or before `now_ns`."""
        expired: list[Finished] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, _, key = heapq.heappop(self._deadlines)
            sequence = self.sequences.get(key)
            if sequence is None:
                continue
            deadline_ns, queue_ns = sequence.request.deadline_ns, sequence.request.queue_deadline_ns
            waiting = sequence.status is RequestStatus.WAITING
            late = deadline_ns is not None and deadline_ns <= now_ns
            if not late and not (waiting and queue_ns is not None and queue_ns <= now_ns):
                continue
            finished = Finished(
                key,
                FinishReason.ERROR,
                sequence.num_output_tokens,
                deadline_phase="queue" if waiting else "run",
            )
            self._finish(sequence, finished)
            expired.append(finished)
        return tuple(expired)

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do at the earliest."""
        while self._deadlines and self._deadlines[0][2] not in self.sequences:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _finish(self, sequence: Sequence, finished: Finished) -> None:
        waiting = sequence.status is not RequestStatus.RUNNING
        sequence.apply(LifecycleEvent.FINISH)
        del self.sequences[finished.key]
        self.shares.charge_outputs(sequence)
        self.shares.leave(sequence.request.tenant)
        if waiting:
            self.waiting.remove(sequence)
        else:
            stay = sequence.stay
            assert stay is not None, "running without a stay"
            self.lanes[stay.lane_id].retire(stay)

    def _preempt(self, sequence: Sequence) -> Preempted:
        sequence.apply(LifecycleEvent.PREEMPT)
        sequence.num_preemptions += 1
        self.totals.preemptions += 1
        self.waiting.push(sequence)
        return Preempted(sequence.request.key)

    # -------------------------------------------------------------------------------------------- steps

    def plan(self, lane_id: LaneId) -> PlanOutcome:
        """Plans the lane's next step if its window is open, after admitting what fits on any lane.

        Raises:
            UnknownLane: no such lane.
        """
        lane = self._lane(lane_id)
        if not is_window_open(lane, self.config):
            return PlanOutcome(None, self._admit())
        # Room for those who run comes before newcomers: nobody is admitted only to make room again (rule E8).
        sitting_out, victims = make_room(lane)
        preempted = tuple(self._preempt(stay.sequence) for stay in victims)
        admitted = self._admit()
        plan = build_plan(lane, self.config, sitting_out)
        if plan is not None:
            self.totals.prefill_tokens += sum(plan.row_counts)
        return PlanOutcome(plan, admitted, preempted)

    def commit(self, lane_id: LaneId, result: StepResult) -> CommitOutcome:
        """Applies the completion of the lane's oldest step in flight.

        A result of an older epoch of the lane is counted and dropped (rule B5).

        Raises:
            UnknownLane: no such lane.
            StepMismatch: the result contradicts the plan; the caller must close the lane's epoch.
        """
        lane = self._lane(lane_id)
        if result.epoch != lane.epoch:
            lane.num_stale_results += 1
            self.totals.stale_results += 1
            return CommitOutcome(result.step_id)
        outcome = commit_step(lane, result, self._finish)
        self.totals.output_tokens += len(outcome.token_ids)
        return outcome

    def fail_step(self, lane_id: LaneId, epoch: int, step_id: StepId) -> None:
        """The lane's oldest step in flight failed as a whole: its rows will be fed again."""
        lane = self._lane(lane_id)
        if epoch == lane.epoch:
            fail_step(lane, step_id)

    def _admit(self) -> tuple[Admitted, ...]:
        if not self.waiting:
            return ()
        lanes = self._open_lanes()
        places = sum(max(0, lane.config.max_num_seqs - lane.num_running) for lane in lanes)
        if not places:
            return ()
        room = (self._arrivals, len(self.waiting), *[lane.room_version for lane in lanes])
        if room == self._no_room:
            return ()  # nothing has changed since nobody found a place: nobody will now
        if self.config.ordering is Ordering.FAIR:
            self._charge_running()
        admitted, is_settled = self._admit_in_order(lanes, places)
        self._no_room = room if is_settled and not admitted else None
        return tuple(admitted)

    def _charge_running(self) -> None:
        for sequence in self.sequences.values():
            if sequence.status is RequestStatus.RUNNING:
                self.shares.charge_outputs(sequence)

    def _admit_in_order(self, lanes: list[Lane], places: int) -> tuple[list[Admitted], bool]:
        """One pass over the head of the queue: who was admitted, and whether nobody is merely held."""
        admitted: list[Admitted] = []
        blocked: list[Sequence] = []
        has_held = False
        by_id = {lane.lane_id: lane for lane in lanes}
        for sequence in list(islice(self.waiting, places + self.config.skip_ahead_window)):
            if blocked and any(passed.times_passed >= self.config.max_times_passed for passed in blocked):
                break
            if sequence.hold is not None and is_still_held(sequence.hold, by_id):
                has_held = True
                continue
            # A preempted sequence whose last step is in flight still owes a token: not yet.
            place = self._find_place(sequence, lanes) if sequence.stay is None else None
            if place is None:
                blocked.append(sequence)
                if len(blocked) > self.config.skip_ahead_window:
                    break
                continue
            if is_held(sequence, place, self.config.max_held_steps):
                has_held = True
                continue
            admitted.append(self._admit_to(place, sequence))
            for passed in blocked:
                passed.times_passed += 1
        return admitted, not has_held

    def _open_lanes(self) -> list[Lane]:
        """Lanes that take newcomers in this pass."""
        if self.config.batching is Batching.CONTINUOUS:
            return list(self.lanes.values())
        return [lane for lane in self.lanes.values() if not lane.num_running and not lane.finishing]

    def _find_place(self, sequence: Sequence, lanes: list[Lane]) -> Place | None:
        parent_key = sequence.request.fork_of
        parent = self.sequences.get(parent_key) if parent_key is not None else None
        return find_place(sequence, lanes, parent)

    def _admit_to(self, place: Place, sequence: Sequence) -> Admitted:
        first_time = sequence.status is RequestStatus.WAITING
        self.waiting.remove(sequence)
        self.waiting.note_admission()
        sequence.apply(LifecycleEvent.ADMIT)
        sequence.times_passed = 0
        sequence.hold = None
        self._incarnations += 1
        lane = place.lane
        prefix, replay = place.prefix, place.prefix.replay
        stay = lane.admit(sequence, Incarnation(self._incarnations), prefix)
        lane.announce_prefill(stay, place.missing_keys)
        # A replay without layers that see everything found nothing: it need not be fed because nobody sees it.
        num_cached_tokens = prefix.num_unfed if replay is None or prefix.keys else 0
        self.totals.cached_tokens += num_cached_tokens
        self.shares.charge_admission(sequence, prefix.num_unfed)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached_tokens
        approximate_from = None if replay is None or replay.is_exact else sequence.num_output_tokens
        self.totals.window_replays += replay is not None
        self.totals.approximate_replays += approximate_from is not None
        key, lane_id = sequence.request.key, lane.lane_id
        return Admitted(key, lane_id, first_time, num_cached_tokens, replay is not None, approximate_from)

    # -------------------------------------------------------------------------------------------- views

    def gate_rows(self, lane_id: LaneId) -> tuple[StepId, list[GateRow]] | None:
        """The constrained rows of the lane's oldest step in flight, or None if no step is.

        Everything before that step is committed, so a mask made now knows every token its row builds on (rule I1).
        """
        lane = self._lane(lane_id)
        if not lane.in_flight:
            return None
        step = lane.in_flight[0]
        return step.step_id, [
            GateRow(
                key=stay.sequence.request.key,
                slot=stay.slot,
                incarnation=stay.incarnation,
                position=position,
                wanted=stay.sequence.status is not RequestStatus.FINISHED and not stay.rewinding,
            )
            for stay, position in step.constrained
        ]

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and have not ended."""
        return len(self.sequences) - len(self.waiting)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight (rule A8): an empty queue alone is not idleness."""
        return not self.sequences and not any(lane.in_flight for lane in self.lanes.values())
