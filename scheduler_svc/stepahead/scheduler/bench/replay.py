"""Replays a trace through the core in virtual time and checks what must hold for every request.

No clock is read but for the speed of the replay itself. The same trace and options give the same schedule.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from itertools import count

from stepahead.scheduler.bench.fairness import ServiceMeter, TenantPicker
from stepahead.scheduler.bench.simulated_lane import DeviceSpeed, SimulatedLane
from stepahead.scheduler.bench.trace_files import Trace
from stepahead.scheduler.bench.trace_prompts import PromptMaker
from stepahead.scheduler.core import (
    Admitted,
    CommitOutcome,
    Finished,
    LaneConfig,
    LaneId,
    Request,
    RequestInfeasible,
    RequestKey,
    Scheduler,
    SchedulerConfig,
)
from stepahead.scheduler.core.invariants import check_invariants

_SAMPLED_TOKEN_ID = 7
"""What every row samples; in no prompt, and no stop id: answers are as long as the trace says."""


class ReplayFailure(Exception):
    """A rule is broken; the message begins with its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What the trace is replayed on."""

    lane: LaneConfig
    num_lanes: int
    speed: DeviceSpeed
    scheduler: SchedulerConfig
    num_tenants: int
    check_every: int
    """Core invariants are checked at every so many-th committed step; 0: never."""


@dataclass(slots=True)
class Progress:
    """One request on its way. Times are virtual, -1: not yet."""

    tenant: int
    arrival_ns: int
    max_output_tokens: int
    first_token_ns: int = -1
    last_token_ns: int = -1
    num_tokens: int = 0
    waits: bool = True


class Replay:
    """One run; `run`, then read the figures."""

    def __init__(self, trace: Trace, options: ReplayOptions) -> None:
        self.options = options
        self.scheduler = Scheduler(options.scheduler)
        self.lanes = [
            SimulatedLane(LaneId(index), options.speed, _SAMPLED_TOKEN_ID) for index in range(options.num_lanes)
        ]
        for lane in self.lanes:
            self.scheduler.open_lane(lane.lane_id, options.lane, lane.epoch)
        self.service = ServiceMeter(options.num_tenants)
        self.queue_ns: array[int] = array("q")
        """Arrival to first admission, per request."""
        self.ttft_ns: array[int] = array("q")
        """Arrival to first token, per request."""
        self.itl_ns: array[int] = array("q")
        """Between two tokens of a request."""
        self.num_refused = 0
        """Requests that fit no lane."""
        self.num_finished = 0
        self.num_admitted_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Of those, the ones that a prefix cache had at the first admission."""
        self.num_calls = 0
        """add_request, plan and commit."""
        self.num_steps = 0
        self.num_checks = 0
        self.now_ns = 0
        self.wall_s = 0.0
        self._trace = trace
        self._prompts = PromptMaker(trace.block_tokens)
        self._tenants = TenantPicker(options.num_tenants)
        self._live: dict[RequestKey, Progress] = {}

    def run(self) -> None:
        """Replays the whole trace.

        Raises:
            ReplayFailure: a request did not end exactly once, or not with the tokens it asked for.
            InvariantViolation: a rule of the core is broken.
        """
        begin_s = time.perf_counter()
        requests = self._trace.requests
        arrivals = iter(range(len(requests)))
        index = next(arrivals, None)
        while True:
            lane = min(
                (lane for lane in self.lanes if lane.next_end_ns is not None),
                key=lambda lane: lane.next_end_ns or 0,
                default=None,
            )
            end_ns = lane.next_end_ns if lane is not None else None
            if index is not None and (end_ns is None or requests[index].arrival_ns < end_ns):
                self._advance(requests[index].arrival_ns)
                while index is not None and requests[index].arrival_ns <= self.now_ns:
                    self._arrive(index)
                    index = next(arrivals, None)
            elif lane is not None and end_ns is not None:
                self._advance(end_ns)
                self._complete(lane)
            else:
                break
            for each in self.lanes:
                self._plan(each)
        self._check_end()
        self.wall_s = time.perf_counter() - begin_s

    def _advance(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.service.advance(now_ns)

    # -------------------------------------------------------------------------------------------- calls

    def _arrive(self, index: int) -> None:
        recorded = self._trace.requests[index]
        tenant = self._tenants.tenant_of(index)
        request = Request(
            key=RequestKey(index + 1),
            prompt_token_ids=self._prompts.prompt_of(index, recorded),
            max_tokens=max(1, recorded.num_output_tokens),
            tenant=f"tenant-{tenant}",
        )
        self.num_calls += 1
        try:
            self.scheduler.add_request(request)
        except RequestInfeasible:
            self.num_refused += 1
            return
        room = self.options.lane.max_model_len - recorded.num_prompt_tokens
        self._live[request.key] = Progress(tenant, self.now_ns, min(request.max_tokens, room))
        self.service.wait(tenant)

    def _plan(self, lane: SimulatedLane) -> None:
        for _ in count():
            outcome = self.scheduler.plan(lane.lane_id)
            self.num_calls += 1
            for preempted in outcome.preempted:
                request = self._live[preempted.key]
                request.waits = True
                self.service.wait(request.tenant)
            for admitted in outcome.admitted:
                self._admit(admitted)
            if outcome.plan is None:
                return
            lane.accept(outcome.plan, self.now_ns)

    def _complete(self, lane: SimulatedLane) -> None:
        outcome = self.scheduler.commit(lane.lane_id, lane.completed())
        self.num_calls += 1
        self.num_steps += 1
        self._deliver(outcome)
        for finished in outcome.finished:
            self._finish(finished)
        if self.options.check_every and self.num_steps % self.options.check_every == 0:
            self._check()

    # -------------------------------------------------------------------------------------------- events

    def _admit(self, admitted: Admitted) -> None:
        request = self._live[admitted.key]
        request.waits = False
        self.service.stop_waiting(request.tenant)
        if not admitted.first_time:
            return
        num_prompt_tokens = self._trace.requests[admitted.key - 1].num_prompt_tokens
        self.num_admitted_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += admitted.num_cached_tokens
        self.queue_ns.append(self.now_ns - request.arrival_ns)
        self.service.serve(request.tenant, num_prompt_tokens - admitted.num_cached_tokens)

    def _deliver(self, outcome: CommitOutcome) -> None:
        now_ns = self.now_ns
        live = self._live
        itl_ns = self.itl_ns
        serve = self.service.serve
        for key in outcome.keys:
            request = live[key]
            request.num_tokens += 1
            if request.first_token_ns < 0:
                request.first_token_ns = now_ns
                self.ttft_ns.append(now_ns - request.arrival_ns)
            else:
                itl_ns.append(now_ns - request.last_token_ns)
            request.last_token_ns = now_ns
            serve(request.tenant, 1)

    def _finish(self, finished: Finished) -> None:
        request = self._live.pop(finished.key, None)
        if request is None:
            raise ReplayFailure(f"D8: request {finished.key} ended twice")
        if request.waits:
            # Preempted while its last token was in flight.
            self.service.stop_waiting(request.tenant)
        if not request.num_tokens == finished.num_output_tokens == request.max_output_tokens:
            raise ReplayFailure(
                f"B11: request {finished.key} asked for {request.max_output_tokens} tokens, got "
                f"{request.num_tokens}, was told {finished.num_output_tokens}"
            )
        self.num_finished += 1

    # -------------------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        self.num_checks += 1
        check_invariants(self.scheduler)

    def _check_end(self) -> None:
        if self._live:
            raise ReplayFailure(f"D8: {len(self._live)} requests never ended, such as {next(iter(self._live))}")
        if not self.scheduler.is_idle:
            raise ReplayFailure("A8: everything ended, but the core is not idle")
        self._check()
