"""A request between acceptance and its last message, and the events a stream makes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stepahead.scheduler.core import Finished, FinishReason, RequestKey
from stepahead.scheduler.delivery import StreamWriter
from stepahead.scheduler.errors import ApiError
from stepahead.scheduler.output_log import LogCursor, OutputLog
from stepahead.scheduler.validation import AcceptedRequest
from stepahead.v1 import generation_pb2

FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: generation_pb2.FINISH_REASON_ERROR,
}


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """Points on the scheduler's monotonic clock, nanoseconds; 0: not yet."""

    accepted_ns: int
    admitted_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0

    def to_proto(self, preemptions: int) -> generation_pb2.Timings:
        """As durations."""
        first = self.first_token_ns or self.finished_ns
        return generation_pb2.Timings(
            queue_ns=max(0, (self.admitted_ns or self.finished_ns) - self.accepted_ns),
            first_token_ns=max(0, first - self.accepted_ns),
            decode_ns=max(0, self.finished_ns - first),
            total_ns=max(0, self.finished_ns - self.accepted_ns),
            preemptions=preemptions,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """The shell's side of one request. The engine writes it, streams read it."""

    key: RequestKey
    accepted: AcceptedRequest
    digest: bytes
    model_name: str
    tenant: str = ""
    log: OutputLog
    times: RequestTimes
    preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission (rule H9)."""
    has_spoken: bool = False
    """Whether the first token was made."""
    finished: Finished | None = None
    error: ApiError | None = None
    subscriptions: list[Subscription] = field(default_factory=list["Subscription"])

    @property
    def phase(self) -> generation_pb2.Keepalive.Phase.ValueType:
        """For keepalives."""
        if not self.times.admitted_ns:
            return generation_pb2.Keepalive.PHASE_QUEUED
        if not self.log.token_ids:
            return generation_pb2.Keepalive.PHASE_PREFILL
        return generation_pb2.Keepalive.PHASE_DECODE

    def started_event(self) -> generation_pb2.GenerationEvent:
        """Admission, with what was applied."""
        accepted = self.accepted
        return generation_pb2.GenerationEvent(
            started=generation_pb2.Started(
                request_id=accepted.request_id,
                model=self.model_name,
                prompt_tokens=len(accepted.prompt_token_ids),
                cached_prompt_tokens=self.num_cached_tokens,
                queue_ns=self.times.admitted_ns - self.times.accepted_ns,
                applied_sampling=accepted.applied_sampling,
                applied_stopping=accepted.applied_stopping,
            )
        )

    def final_events(self) -> list[generation_pb2.GenerationEvent]:
        """The end of the choice, and of the request unless it failed."""
        finished = self.finished
        assert finished is not None, "not finished"
        ended = generation_pb2.ChoiceFinished(
            reason=FINISH_REASONS[finished.reason], output_tokens=finished.num_output_tokens
        )
        if finished.matched_token_id is not None:
            ended.token_id = finished.matched_token_id
        elif self.log.matched_stop is not None:
            ended.stop_string = self.log.matched_stop
        events = [generation_pb2.GenerationEvent(choice_finished=ended)]
        if self.error is None:
            usage = generation_pb2.Usage(
                prompt_tokens=len(self.accepted.prompt_token_ids),
                cached_prompt_tokens=self.num_cached_tokens,
                output_tokens=finished.num_output_tokens,
            )
            final = generation_pb2.GenerationFinished(usage=usage, timings=self.times.to_proto(self.preemptions))
            events.append(generation_pb2.GenerationEvent(finished=final))
        return events


class Subscription:
    """One stream's view of one request."""

    __slots__ = ("cursor", "dirty", "handle", "is_plain", "live", "started_sent", "writer")

    def __init__(
        self,
        live: LiveRequest,
        writer: StreamWriter,
        *,
        handle: int = 0,
        dirty: dict[Subscription, None] | None = None,
    ) -> None:
        """Subscribes to a request.

        Args:
            live: The request.
            writer: The stream that gets turns.
            handle: The request's name on a Multiplex stream.
            dirty: Where a stream of many requests collects those that have news.
        """
        self.live = live
        self.writer = writer
        self.handle = handle
        self.dirty = dirty
        accepted = live.accepted
        self.is_plain = accepted.want_token_ids and not accepted.want_text and not accepted.final_only
        """Whether its deltas are nothing but token ids, and may travel as columns."""
        self.cursor = LogCursor()
        self.started_sent = False
        live.subscriptions.append(self)

    def close(self) -> None:
        """The stream reads no more."""
        if self in self.live.subscriptions:
            self.live.subscriptions.remove(self)

    def take(self) -> tuple[list[generation_pb2.GenerationEvent], bool]:
        """Everything new as events, and whether these are the last ones.

        Raises:
            DetokenizeError: a token cannot be decoded.
        """
        live = self.live
        events: list[generation_pb2.GenerationEvent] = []
        if live.times.admitted_ns and not self.started_sent:
            self.started_sent = True
            events.append(live.started_event())
        done = live.finished is not None
        if done or not live.accepted.final_only:
            delta = self._delta()
            if delta is not None:
                events.append(generation_pb2.GenerationEvent(delta=delta))
        if done:
            events += live.final_events()
        return events, done

    def _delta(self) -> generation_pb2.TokenDelta | None:
        accepted = self.live.accepted
        if accepted.want_text and self.live.finished is None:
            self.live.log.decode()
        fresh = self.live.log.read(self.cursor)
        if fresh is None:
            return None
        token_ids = fresh.token_ids if accepted.want_token_ids else ()
        text = fresh.text if accepted.want_text else ""  # stop strings make text that nobody asked for
        if not token_ids and not text:
            return None
        return generation_pb2.TokenDelta(first_token_index=fresh.first_token_index, token_ids=token_ids, text=text)


def now_ns() -> int:
    """The scheduler's monotonic clock."""
    return time.monotonic_ns()
