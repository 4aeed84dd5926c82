"""The live requests: tokens go to their logs, news to their streams, and each ends in exactly one way (rule D8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import structlog

from stepahead.scheduler.core import (
    Admitted,
    CommitOutcome,
    Finished,
    FinishReason,
    LaneId,
    Preempted,
    RequestKey,
    TokenLogprobs,
)
from stepahead.scheduler.core_bridge import error_of, is_stop_id
from stepahead.scheduler.delivery import MessageBudget, StreamWriter
from stepahead.scheduler.errors import ApiError, InternalError, Unavailable
from stepahead.scheduler.live_request import Choice, LiveRequest, now_ns
from stepahead.scheduler.steady_rows import LaneRows, SteadyRows
from stepahead.scheduler.subscription import Subscription
from stepahead.scheduler.telemetry import incident_id
from stepahead.scheduler.text.errors import TextError

log = structlog.get_logger("requests")

Abort = Callable[[RequestKey, FinishReason], Finished | None]
NoteEnd = Callable[[LiveRequest, FinishReason], None]


class RequestBook:
    """Requests that have not ended, and who listens to them."""

    def __init__(self, budget: MessageBudget, abort: Abort, note_end: NoteEnd) -> None:
        """Starts empty.

        Args:
            budget: gives streams their turns.
            abort: ends a sequence of the core now.
            note_end: told of each request's end, in the turn of the step loop: anything long must come later.
        """
        self.requests: dict[RequestKey, LiveRequest] = {}
        self.choices: dict[RequestKey, Choice] = {}
        self.with_stop_strings: set[RequestKey] = set()
        """Choices whose text is scanned at commit."""
        self.totals = {"accepted": 0, "finished": 0, "cancelled": 0, "failed": 0, "unserved": 0}
        """Requests since start; "unserved" are those among the failed that ended with UNAVAILABLE."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called when a request has ended and the core has none left."""
        self._budget = budget
        self._abort = abort
        self._note_end = note_end
        self._rows: dict[LaneId, LaneRows] = {}

    def add(self, live: LiveRequest) -> None:
        """The core has accepted it."""
        self.requests[live.key] = live
        for choice in live.choices:
            self.choices[choice.key] = choice
            if live.accepted.stop_strings:
                self.with_stop_strings.add(choice.key)
        self.totals["accepted"] += 1

    # -------------------------------------------------------------------------------------------- tokens

    def fan_out(self, lane_id: LaneId, outcome: CommitOutcome, ended: dict[RequestKey, Finished]) -> None:
        """Appends tokens to output logs and lets streams ask for their turn. This runs per row and step."""
        rows = self._rows_of(lane_id, outcome.keys)
        self._append(rows.commit(outcome.token_ids, self._budget), outcome.logprobs, ended)
        if outcome.prompt_logprobs:
            self._note_prompt_logprobs(outcome)
        for key, finished in ended.items():
            choice = self.choices.get(key)
            if choice is not None:
                self.end_choice(choice, finished, error_of(finished))

    def _append(
        self,
        rows: Iterable[tuple[Choice | None, int]],
        logprobs: dict[RequestKey, TokenLogprobs],
        ended: dict[RequestKey, Finished],
    ) -> None:
        request_turn = self._budget.request
        scanned = self.with_stop_strings
        for choice, token in rows:
            if choice is None or choice.finished is not None:
                continue  # an error ended it in this very turn
            if not scanned or choice.key not in scanned or is_stop_id(ended.get(choice.key)):
                if logprobs:
                    choice.log.append(token, logprobs.get(choice.key))
                else:
                    choice.log.token_ids.append(token)
            live = choice.live
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

    def _rows_of(self, lane_id: LaneId, keys: list[RequestKey]) -> LaneRows:
        """The rows of a lane's commit. The core hands out the same list while they stay the same."""
        rows = self._rows.get(lane_id)
        if rows is None or rows.keys is not keys:
            self.forget_rows(lane_id)
            rows = self._rows[lane_id] = LaneRows(keys, [self.choices.get(key) for key in keys])
        return rows

    def forget_rows(self, lane_id: LaneId) -> None:
        """The rows of the lane have changed, or it is lost."""
        rows = self._rows.pop(lane_id, None)
        if rows is not None:
            rows.dissolve()

    def make_columns(
        self, writer: StreamWriter, news: dict[SteadyRows, None], caught_up: Mapping[Subscription, None]
    ) -> None:
        """A stream has said all there is of many requests: see `LaneRows.make_columns`."""
        for rows in self._rows.values():
            rows.make_columns(writer, news, caught_up)

    def _note_prompt_logprobs(self, outcome: CommitOutcome) -> None:
        for key, record in outcome.prompt_logprobs.items():
            choice = self.choices.get(key)
            if choice is None:
                continue
            try:
                choice.live.prompt_logprobs.add(record)
            except ValueError as error:
                self.fail_internally(choice.live, error)

    # -------------------------------------------------------------------------------------------- notes

    def note_admitted(self, admitted: tuple[Admitted, ...]) -> None:
        """Sequences got a slot."""
        for entry in admitted:
            choice = self.choices[entry.key]
            choice.note_admitted(entry)
            live = choice.live
            if not live.times.admitted_ns:
                live.times.admitted_ns = now_ns()
                live.num_cached_tokens = entry.num_cached_tokens
                for subscription in live.subscriptions:
                    subscription.note_news()
                    self._budget.request(subscription.writer)

    def note_preempted(self, preempted: tuple[Preempted, ...]) -> None:
        """Sequences lost their slot."""
        for entry in preempted:
            choice = self.choices[entry.key]
            choice.log.leave_columns()  # its next token may come from another lane
            choice.live.preemptions += 1

    # -------------------------------------------------------------------------------------------- ends

    def end_choice(self, choice: Choice, finished: Finished, error: ApiError | None) -> None:
        """The core has ended the choice. The request goes with the last one, or with the first that fails."""
        if choice.finished is not None:
            return
        live = choice.live
        self._close(choice, finished)
        error = error or live.error
        if error is not None:
            self.fail(live, error)
        elif all(other.finished is not None for other in live.choices):
            self._end(live)
        else:
            self._announce(live)

    def fail(self, live: LiveRequest, error: ApiError, reason: FinishReason = FinishReason.ERROR) -> None:
        """Ends a request with a status now; what is left of its choices is aborted. Harmless if it has ended."""
        if live.is_over:
            return
        live.error = live.error or error
        for choice in live.choices:
            if choice.finished is None:
                finished = self._abort(choice.key, reason)
                # None: the core has ended it in the turn whose tokens nobody has seen yet.
                self._close(choice, finished or Finished(choice.key, reason, len(choice.log.token_ids)))
        self._end(live)

    def fail_internally(self, live: LiveRequest, error: Exception) -> None:
        """Ends one request after a fault of ours; the others go on (rule K8)."""
        incident = incident_id()
        log.error("request failed", incident=incident, request_key=live.key, error=repr(error))
        self.fail(live, InternalError(incident))

    def _close(self, choice: Choice, finished: Finished) -> None:
        """Nothing is added to the choice any more."""
        choice.log.leave_columns()
        del self.choices[choice.key]
        self.with_stop_strings.discard(choice.key)
        # A request that fails in mid-turn was ended by the core behind tokens that nobody is told of any more.
        num_delivered = min(finished.num_output_tokens, len(choice.log.token_ids))
        finished = choice.finished = replace(finished, num_output_tokens=num_delivered)
        try:
            choice.log.end(finished.num_output_tokens, ends_with_stop_id=is_stop_id(finished))
        except TextError as text_error:
            incident = incident_id()
            log.error("text failed", incident=incident, request_key=choice.key, error=repr(text_error))
            choice.live.error = choice.live.error or InternalError(incident)
            choice.finished = replace(finished, reason=FinishReason.ERROR)

    def end_newcomer(self, live: LiveRequest, error: ApiError, reason: FinishReason = FinishReason.ERROR) -> None:
        """Ends a request that was accepted while there was no worker, and that the core has never seen."""
        self.totals["accepted"] += 1
        live.error = error
        for choice in live.choices:
            choice.finished = Finished(choice.key, reason, 0)
        self._conclude(live)

    def _end(self, live: LiveRequest) -> None:
        del self.requests[live.key]
        self._conclude(live)

    def _conclude(self, live: LiveRequest) -> None:
        """The one place where a request ends in the shell."""
        live.times.finished_ns = now_ns()
        live.is_over = True
        self._count_end(live)
        self._announce(live)
        if not self.requests:
            self.on_idle()

    def _announce(self, live: LiveRequest) -> None:
        """News that must not wait for the budget: a first token, an end."""
        for subscription in live.subscriptions:
            subscription.note_news()
            self._budget.urgent(subscription.writer)

    def _count_end(self, live: LiveRequest) -> None:
        reasons = [choice.finished.reason for choice in live.choices if choice.finished is not None]
        worst = max(reasons, key=list(FinishReason).index)
        kind = {FinishReason.CANCELLED: "cancelled", FinishReason.ERROR: "failed"}.get(worst, "finished")
        self.totals[kind] += 1
        self.totals["unserved"] += isinstance(live.error, Unavailable)
        self._note_end(live, worst)
