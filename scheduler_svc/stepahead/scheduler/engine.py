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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from stepahead.scheduler.convert import plan_to_proto, result_from_proto
from stepahead.scheduler.core import (
    CommitOutcome,
    Finished,
    FinishReason,
    LaneConfig,
    LaneId,
    QueueFull,
    RequestInfeasible,
    RequestKey,
    Scheduler,
    SchedulerConfig,
    StepId,
    UnknownLane,
)
from stepahead.scheduler.core_bridge import core_requests, error_of
from stepahead.scheduler.delivery import MessageBudget
from stepahead.scheduler.end_log import EndLog
from stepahead.scheduler.errors import (
    ApiError,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    Unavailable,
)
from stepahead.scheduler.gates import Gates
from stepahead.scheduler.live_request import LiveRequest, now_ns
from stepahead.scheduler.request_book import RequestBook
from stepahead.scheduler.settings import Settings
from stepahead.scheduler.text.errors import TextError
from stepahead.scheduler.worker_link import WorkerLink
from stepahead.v1 import worker_pb2

if TYPE_CHECKING:
    from stepahead.scheduler.constraints.compiler import CompiledConstraint

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
        self._end_log = EndLog(loop)
        self.book = RequestBook(self.budget, self.core.abort, self._end_log.add)
        self.gates = Gates(loop, self.core, self.book)
        self.gates.on_failed = self._plan_open_lanes
        self.links: dict[LaneId, WorkerLink] = {}
        """Lanes that are open."""
        self.on_lane_opened: Callable[[], None] = lambda: None
        self.why_no_worker: Callable[[], str] = lambda: ""
        """What is known about why no worker takes work, for whoever is told so; empty: nothing."""
        self.on_fatal: Callable[[Exception], None] = _raise
        """Called when a turn fails half-way: the process must end (rule O5)."""
        self._loop = loop
        self._next_key = 0
        self._turn: _Turn | None = None
        self._planning: asyncio.Handle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._lane_wait_timer: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------------------- requests

    def mint_key(self) -> RequestKey:
        """A key for a new request."""
        self._next_key += 1
        return RequestKey(self._next_key)

    def submit(self, live: LiveRequest, compiled: CompiledConstraint | None = None) -> None:
        """Accepts a request; from here on it ends in exactly one terminal message.

        Args:
            live: the request.
            compiled: its constraint, if it has one.

        Raises:
            Overloaded: the waiting queue is full.
            Unavailable: no worker is ready.
            InvalidRequest: it could never run on these workers.
        """
        try:
            self.core.add_requests(core_requests(live))
        except QueueFull as error:
            raise Overloaded(str(error), retry_delay_ms=1000) from error
        except UnknownLane as error:
            raise self.no_worker("NOT_READY", "no worker is ready") from error
        except RequestInfeasible as error:
            raise InvalidRequest(
                [FieldViolation("stopping.max_tokens", f"prompt and output need {error}")],
                metadata={"limit": str(error.available_tokens), "actual": str(error.needed_tokens)},
            ) from error
        self.book.add(live)
        if compiled is not None:
            self.gates.add(live, compiled)
        self._arm_deadline_timer()
        if self._planning is None:
            # One pass over queue and lanes for all prompts that come in the same turn of the loop.
            self._planning = self._loop.call_soon(self._or_die, self._plan_newcomers)

    def _plan_newcomers(self) -> None:
        self._planning = None
        self._plan_open_lanes()
        self.budget.pump()

    def cancel(self, live: LiveRequest, error: ApiError | None = None) -> None:
        """Ends a request now (rule F2). Harmless if it has ended."""
        if live.is_over:
            return
        self.finish_turn()
        if live.is_over:
            return  # it ended in the very turn that nobody had looked at
        reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
        self.book.fail(live, error or RequestCancelled("the request was cancelled"), reason)
        self._plan_open_lanes()

    def fail_internally(self, live: LiveRequest, error: Exception) -> None:
        """Ends one request after a fault of ours; the others go on (rule K8)."""
        self.finish_turn()
        self.book.fail_internally(live, error)
        self._plan_open_lanes()

    # -------------------------------------------------------------------------------------------- lanes

    def open_lane(self, link: WorkerLink, config: LaneConfig, epoch: int) -> None:
        """A worker's new session stands: empty batch, empty cache."""
        self.core.open_lane(link.lane_id, config, epoch)
        self.links[link.lane_id] = link
        if self._lane_wait_timer is not None:
            self._lane_wait_timer.cancel()
            self._lane_wait_timer = None
        windows = {each.window: each.num_blocks for each in config.windows}
        log.info(
            "lane opened", worker=link.address, epoch=epoch, num_blocks=config.num_blocks, window_blocks=windows
        )
        self._plan_open_lanes()
        self.on_lane_opened()

    def lose_lane(self, link: WorkerLink, reason: str) -> None:
        """The worker's state is void; its sequences continue elsewhere, or wait for a worker."""
        if self.links.pop(link.lane_id, None) is None:
            return
        self.finish_turn()
        self.gates.forget(link)
        preempted = self.core.lose_lane(link.lane_id)
        self.book.forget_rows(link.lane_id)
        log.warning("lane lost", worker=link.address, reason=reason, num_sequences=len(preempted))
        self.book.note_preempted(preempted)
        if self.links:
            self._plan_open_lanes()
            return
        if self.book.requests:
            self._lane_wait_timer = self._loop.call_later(self.settings.lane_wait_s, self._give_up_waiting)

    def close(self) -> None:
        """The service stops; nothing runs any more. Twice is harmless."""
        self.gates.close()
        self._end_log.close()

    def _give_up_waiting(self) -> None:
        self._lane_wait_timer = None
        for live in list(self.book.requests.values()):
            self.cancel(live, self.no_worker("WORKER_LOST", "the worker was lost and none came back in time"))

    def no_worker(self, reason: str, text: str) -> Unavailable:
        """A status of the given reason, and why no worker takes work as far as it is known."""
        why = self.why_no_worker()
        return Unavailable(reason, f"{text}: {why}" if why else text)

    # -------------------------------------------------------------------------------------------- the loop

    def on_boundary(self, link: WorkerLink, boundary: worker_pb2.StepBoundary, read_ns: int) -> None:
        """One turn of the step loop.

        Raises:
            StepMismatch: the boundary contradicts the plan; the link must close the epoch.
        """
        self.finish_turn()
        outcome = self.core.commit(link.lane_id, result_from_proto(boundary))
        ended = {finished.key: finished for finished in outcome.finished}
        if self.book.with_stop_strings:
            self._scan_stop_strings(outcome, ended)
        self.gates.advance(outcome, ended)
        self.gates.open(link)
        was_planned = self._plan(link, read_ns=read_ns)
        plan_ns = time.monotonic_ns() - read_ns if was_planned else 0
        self._turn = _Turn(link, boundary, outcome, ended, plan_ns)
        # The plan is on the wire by now; nobody's token has been looked at.
        self._loop.call_soon(self._or_die, self.finish_turn)

    def finish_turn(self) -> None:
        """What is left of the last turn. Everything that looks at requests calls it first."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self.book.fan_out(turn.link.lane_id, turn.outcome, turn.ended)
        turn.link.note_boundary(turn.boundary, turn.outcome, turn.plan_ns)
        self.budget.pump()

    def _or_die(self, callback: Callable[[], None]) -> None:
        try:
            callback()
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
                self.book.note_admitted(outcome.admitted)
                others |= {entry.lane_id for entry in outcome.admitted}
            if outcome.preempted:
                self.book.note_preempted(outcome.preempted)
            if outcome.plan is None:
                break
            # A step planned in the turn of a boundary had its work waiting; one that starts an idle lane had not.
            link.send_plan(plan_to_proto(outcome.plan), work_waited=bool(read_ns) or was_planned)
            was_planned = True
        self.gates.open(link)
        for lane_id in others - {link.lane_id}:
            self._plan(self.links[lane_id])
        return was_planned

    def _scan_stop_strings(self, outcome: CommitOutcome, ended: dict[RequestKey, Finished]) -> None:
        """Decodes rows with stop strings now: the next plan must not contain a row that has ended (rule K6)."""
        for key, token in zip(outcome.keys, outcome.token_ids, strict=True):
            if key not in self.book.with_stop_strings:
                continue
            choice = self.book.choices[key]
            finished = ended.get(key)
            if finished is not None and finished.matched_token_id is not None:
                continue  # the stop id is no part of the text; the end flushes what is held back
            choice.log.append(token, outcome.logprobs.get(key))
            try:
                matched = choice.log.decode()
            except TextError as error:
                self.book.fail_internally(choice.live, error)
                continue
            if matched is None:
                continue
            stopped = self.core.finish_at(key, choice.log.num_decoded)
            # On the last allowed token the core has ended the request with LENGTH: stop wins (rule D5).
            ended[key] = stopped or Finished(key, FinishReason.STOP, choice.log.num_decoded)

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
        no_worker = None if self.links else self.why_no_worker()
        for finished in self.core.expire(now_ns()):
            choice = self.book.choices.get(finished.key)
            if choice is not None:  # else it went with another choice of its request
                self.book.end_choice(choice, finished, error_of(finished, no_worker))
        self._arm_deadline_timer()
        self._plan_open_lanes()


def _raise(error: Exception) -> None:
    raise error
