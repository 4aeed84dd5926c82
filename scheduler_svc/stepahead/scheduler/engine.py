"""The step loop: boundary -> commit -> stop strings -> plan -> send, then everybody else.

One synchronous turn per boundary, run in the reader of a worker's stream:

    worker ==boundary N-1==> commit N-1 ; plan N+1 ==plan N+1==> worker      (step N is running meanwhile)
                                         `-> then fan-out: append to output logs, let streams take their turn

Nothing in a turn awaits: a stream, a slow client or another worker can never hold a plan back. Text is decoded
when a stream takes its turn, except for requests with stop strings, whose end the next plan must know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from stepahead.scheduler.convert import plan_to_proto, result_from_proto
from stepahead.scheduler.core import (
    Admitted,
    CommitOutcome,
    Finished,
    FinishReason,
    LaneConfig,
    LaneId,
    Preempted,
    QueueFull,
    RequestInfeasible,
    RequestKey,
    Scheduler,
    SchedulerConfig,
    StepId,
    UnknownLane,
)
from stepahead.scheduler.core_bridge import core_request, error_of, is_stop_id
from stepahead.scheduler.delivery import MessageBudget
from stepahead.scheduler.errors import (
    ApiError,
    FieldViolation,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    Unavailable,
)
from stepahead.scheduler.live_request import LiveRequest, now_ns
from stepahead.scheduler.settings import Settings
from stepahead.scheduler.telemetry import incident_id
from stepahead.scheduler.text.errors import TextError
from stepahead.scheduler.worker_link import WorkerLink
from stepahead.v1 import worker_pb2

log = structlog.get_logger("engine")


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn whose plan has left and whose tokens nobody has seen."""

    link: WorkerLink
    boundary: worker_pb2.StepBoundary
    outcome: CommitOutcome
    ended: dict[RequestKey, Finished]
    plan_ns: int


class Engine:
    """Owns the core and the live requests. Everything runs on one event loop; no call of it awaits."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.core = Scheduler(
            SchedulerConfig(
                overlap_depth=settings.overlap_depth,
                settle_prompts_in_place=settings.settle_prompts_in_place,
                batching=settings.batching,
                ordering=settings.ordering,
                max_waiting=settings.max_waiting_requests,
                prefix_caching=settings.prefix_caching,
            )
        )
        self.budget = MessageBudget(loop, settings.messages_per_second)
        self.requests: dict[RequestKey, LiveRequest] = {}
        self.links: dict[LaneId, WorkerLink] = {}
        """Lanes that are open."""
        self.totals = {"accepted": 0, "finished": 0, "cancelled": 0, "failed": 0}
        self.on_fatal: Callable[[Exception], None] = _raise
        """Called when a turn fails half-way: the process must end (rule O5)."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last live request has ended."""
        self._loop = loop
        self._next_key = 0
        self._with_stop_strings: set[RequestKey] = set()
        self._turn: _Turn | None = None
        self._known_keys: list[RequestKey] = []
        self._known_lives: list[LiveRequest | None] = []
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._lane_wait_timer: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------------------- requests

    def mint_key(self) -> RequestKey:
        """A key for a new request."""
        self._next_key += 1
        return RequestKey(self._next_key)

    def submit(self, live: LiveRequest) -> None:
        """Accepts a request; from here on it ends in exactly one terminal message.

        Raises:
            Overloaded: the waiting queue is full.
            Unavailable: no worker is ready.
            InvalidRequest: it could never run on these workers.
        """
        try:
            self.core.add_request(core_request(live))
        except QueueFull as error:
            raise Overloaded(str(error), retry_delay_ms=1000) from error
        except UnknownLane as error:
            raise Unavailable("NOT_READY", "no worker is ready") from error
        except RequestInfeasible as error:
            raise InvalidRequest(
                [FieldViolation("stopping.max_tokens", f"prompt and output need {error}")],
                metadata={"limit": str(error.available_tokens), "actual": str(error.needed_tokens)},
            ) from error
        self.requests[live.key] = live
        if live.accepted.stop_strings:
            self._with_stop_strings.add(live.key)
        self.totals["accepted"] += 1
        self._arm_deadline_timer()
        self._plan_open_lanes()
        self.budget.pump()

    def cancel(self, live: LiveRequest, error: ApiError | None = None) -> None:
        """Ends a request now (rule F2). Harmless if it has ended."""
        if live.finished is not None:
            return
        self.finish_turn()
        reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
        finished = self.core.abort(live.key, reason)
        if finished is not None:
            self._end(live, finished, error or RequestCancelled("the request was cancelled"))
            self._plan_open_lanes()

    def fail_internally(self, live: LiveRequest, error: Exception) -> None:
        """Ends one request after a fault of ours; the others go on (rule K8)."""
        incident = incident_id()
        log.error("request failed", incident=incident, request_key=live.key, error=repr(error))
        self.cancel(live, InternalError(incident))

    # -------------------------------------------------------------------------------------------- lanes

    def open_lane(self, link: WorkerLink, config: LaneConfig, epoch: int) -> None:
        """A worker's new session stands: empty batch, empty cache."""
        self.core.open_lane(link.lane_id, config, epoch)
        self.links[link.lane_id] = link
        if self._lane_wait_timer is not None:
            self._lane_wait_timer.cancel()
            self._lane_wait_timer = None
        log.info("lane opened", worker=link.address, epoch=epoch, num_blocks=config.num_blocks)
        self._plan_open_lanes()

    def lose_lane(self, link: WorkerLink, reason: str) -> None:
        """The worker's state is void; its sequences continue elsewhere, or wait for a worker."""
        if self.links.pop(link.lane_id, None) is None:
            return
        self.finish_turn()
        preempted = self.core.lose_lane(link.lane_id)
        log.warning("lane lost", worker=link.address, reason=reason, num_sequences=len(preempted))
        self._note_preempted(preempted)
        if self.links:
            self._plan_open_lanes()
        elif self.requests:
            self._lane_wait_timer = self._loop.call_later(self.settings.lane_wait_s, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        self._lane_wait_timer = None
        for live in list(self.requests.values()):
            self.cancel(live, Unavailable("WORKER_LOST", "the worker was lost and none came back in time"))

    # -------------------------------------------------------------------------------------------- the loop

    def on_boundary(self, link: WorkerLink, boundary: worker_pb2.StepBoundary, read_ns: int) -> None:
        """One turn of the step loop.

        Raises:
            StepMismatch: the boundary contradicts the plan; the link must close the epoch.
        """
        self.finish_turn()
        outcome = self.core.commit(link.lane_id, result_from_proto(boundary))
        ended = {finished.key: finished for finished in outcome.finished}
        if self._with_stop_strings:
            self._scan_stop_strings(outcome, ended)
        was_planned = self._plan(link, read_ns=read_ns)
        plan_ns = time.monotonic_ns() - read_ns if was_planned else 0
        self._turn = _Turn(link, boundary, outcome, ended, plan_ns)
        # The writer's task is woken by now and stands before this in the loop's queue: the plan is on the wire
        # before anybody's token is looked at.
        self._loop.call_soon(self._finish_turn_or_die)

    def finish_turn(self) -> None:
        """What is left of the last turn. Everything that looks at requests calls it first."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self._fan_out(turn.outcome, turn.ended)
        turn.link.note_boundary(turn.boundary, turn.outcome, turn.plan_ns)
        self.budget.pump()

    def _finish_turn_or_die(self) -> None:
        try:
            self.finish_turn()
        except Exception as error:  # noqa: BLE001 - a loop callback's exception would only be logged
            self.on_fatal(error)

    def on_step_failed(self, link: WorkerLink, epoch: int, step_id: int) -> None:
        """A step failed as a whole: its rows run again."""
        self.finish_turn()
        self.core.fail_step(link.lane_id, epoch, StepId(step_id))
        self._plan(link)

    def _plan_open_lanes(self) -> None:
        for link in list(self.links.values()):
            self._plan(link)

    def _plan(self, link: WorkerLink, *, read_ns: int = 0) -> bool:
        """Plans and sends while the lane's window is open. True if anything was sent."""
        others: set[LaneId] = set()
        was_planned = False
        while True:
            outcome = self.core.plan(link.lane_id)
            if outcome.admitted:
                others |= self._note_admitted(outcome.admitted)
            if outcome.preempted:
                self._note_preempted(outcome.preempted)
            if outcome.plan is None:
                break
            # A step planned in the turn of a boundary had its work waiting; one that starts an idle lane had not.
            link.send_plan(plan_to_proto(outcome.plan), work_waited=bool(read_ns) or was_planned)
            was_planned = True
        for lane_id in others - {link.lane_id}:
            self._plan(self.links[lane_id])
        return was_planned

    def _scan_stop_strings(self, outcome: CommitOutcome, ended: dict[RequestKey, Finished]) -> None:
        """Decodes rows with stop strings now: the next plan must not contain a row that has ended (rule K6)."""
        for key, token in zip(outcome.keys, outcome.token_ids, strict=True):
            if key not in self._with_stop_strings:
                continue
            live = self.requests[key]
            finished = ended.get(key)
            if finished is not None and finished.matched_token_id is not None:
                continue  # the stop id is no part of the text; the end flushes what is held back
            live.log.token_ids.append(token)
            try:
                matched = live.log.decode()
            except TextError as error:
                self.fail_internally(live, error)
                continue
            if matched is None:
                continue
            stopped = self.core.finish_at(key, live.log.num_decoded)
            # On the last allowed token the core has ended the request with LENGTH: stop wins (rule D5).
            ended[key] = stopped or Finished(key, FinishReason.STOP, live.log.num_decoded)

    def _fan_out(self, outcome: CommitOutcome, ended: dict[RequestKey, Finished]) -> None:
        """Appends tokens to output logs and lets streams ask for their turn. This runs per row and step."""
        request_turn = self.budget.request
        scanned = self._with_stop_strings
        for live, token in zip(self._lives_of(outcome.keys), outcome.token_ids, strict=True):
            if live is None or live.finished is not None:
                continue  # a text error ended it in this very turn
            if not scanned or live.key not in scanned or is_stop_id(ended.get(live.key)):
                live.log.token_ids.append(token)
            if not live.has_spoken:
                live.has_spoken = True
                live.times.first_token_ns = now_ns()
                self._announce(live)
                continue
            for subscription in live.subscriptions:
                dirty = subscription.dirty
                if dirty is not None:
                    dirty[subscription] = None
                writer = subscription.writer
                if not writer.queued:
                    request_turn(writer)
        for key, finished in ended.items():
            live = self.requests.get(key)
            if live is not None:
                self._end(live, finished, error_of(finished))

    def _lives_of(self, keys: list[RequestKey]) -> list[LiveRequest | None]:
        """The live requests of a commit's rows. The core hands out the same list while its rows stay the same."""
        if keys is not self._known_keys:
            self._known_lives = [self.requests.get(key) for key in keys]
            self._known_keys = keys
        return self._known_lives

    # -------------------------------------------------------------------------------------------- notes

    def _note_admitted(self, admitted: tuple[Admitted, ...]) -> set[LaneId]:
        for entry in admitted:
            live = self.requests[entry.key]
            if entry.first_time:
                live.times.admitted_ns = now_ns()
                live.num_cached_tokens = entry.num_cached_tokens
                for subscription in live.subscriptions:
                    if subscription.dirty is not None:
                        subscription.dirty[subscription] = None
                    self.budget.request(subscription.writer)
        return {entry.lane_id for entry in admitted}

    def _note_preempted(self, preempted: tuple[Preempted, ...]) -> None:
        for entry in preempted:
            self.requests[entry.key].preemptions += 1

    def _end(self, live: LiveRequest, finished: Finished, error: ApiError | None) -> None:
        """The one place where a request ends in the shell."""
        del self.requests[live.key]
        self._with_stop_strings.discard(live.key)
        live.times.finished_ns = now_ns()
        live.finished = finished
        live.error = error
        try:
            live.log.end(finished.num_output_tokens, ends_with_stop_id=is_stop_id(finished))
        except TextError as text_error:
            incident = incident_id()
            log.error("text failed", incident=incident, request_key=live.key, error=repr(text_error))
            live.error = InternalError(incident)
            live.finished = replace(finished, reason=FinishReason.ERROR)
        self._count_end(live)
        self._announce(live)
        if not self.requests:
            self.on_idle()

    def _announce(self, live: LiveRequest) -> None:
        """News that must not wait for the budget: a first token, an end."""
        for subscription in live.subscriptions:
            if subscription.dirty is not None:
                subscription.dirty[subscription] = None
            self.budget.urgent(subscription.writer)

    def _count_end(self, live: LiveRequest) -> None:
        finished = live.finished
        assert finished is not None, "counted before its end"
        kind = {FinishReason.CANCELLED: "cancelled", FinishReason.ERROR: "failed"}.get(finished.reason, "finished")
        self.totals[kind] += 1
        times = live.times
        log.info(
            "request ended",
            request_id=live.accepted.request_id,
            request_key=live.key,
            reason=finished.reason.value,
            status=live.error.code.name if live.error else "OK",
            prompt_tokens=len(live.accepted.prompt_token_ids),
            output_tokens=finished.num_output_tokens,
            preemptions=live.preemptions,
            queue_ms=round(max(0, (times.admitted_ns or times.finished_ns) - times.accepted_ns) / 1e6, 3),
            first_token_ms=round(max(0, times.first_token_ns - times.accepted_ns) / 1e6, 3),
            total_ms=round((times.finished_ns - times.accepted_ns) / 1e6, 3),
        )

    # -------------------------------------------------------------------------------------------- deadlines

    def _arm_deadline_timer(self) -> None:
        deadline_ns = self.core.next_deadline_ns
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        if deadline_ns is not None:
            delay = max(0.0, (deadline_ns - now_ns()) / 1e9)
            self._deadline_timer = self._loop.call_later(delay, self._expire)

    def _expire(self) -> None:
        self._deadline_timer = None
        self.finish_turn()
        for finished in self.core.expire(now_ns()):
            self._end(self.requests[finished.key], finished, error_of(finished))
        self._arm_deadline_timer()
        self._plan_open_lanes()


def _raise(error: Exception) -> None:
    raise error
