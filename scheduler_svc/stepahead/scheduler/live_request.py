"""A request between acceptance and its last message, and its choices."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepahead.scheduler.core import Admitted, Finished, FinishReason, RequestKey
from stepahead.scheduler.errors import ApiError
from stepahead.scheduler.logprobs import PromptLogprobLog
from stepahead.scheduler.output_log import OutputLog
from stepahead.scheduler.validation import AcceptedRequest
from stepahead.v1 import generation_pb2

if TYPE_CHECKING:
    from stepahead.scheduler.subscription import Subscription

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
class Choice:
    """One of a request's answers; a sequence of the core."""

    key: RequestKey
    index: int
    log: OutputLog
    live: LiveRequest = field(init=False, repr=False)
    """Not of a request that is forgotten: see `LiveRequest.part`."""
    finished: Finished | None = None
    window_replays: int = 0
    """Times its sliding windows alone were computed again."""
    approximate_replays: int = 0
    """Those among them from fewer positions than exact states take."""
    first_approximate: int | None = None
    """Output index of the first token that such a replay may have changed."""

    def note_admitted(self, entry: Admitted) -> None:
        """It got a slot."""
        self.window_replays += entry.replays
        if entry.approximate_from is not None:
            self.approximate_replays += 1
            if self.first_approximate is None:
                self.first_approximate = entry.approximate_from

    def finished_event(self) -> generation_pb2.GenerationEvent:
        """Its end."""
        finished = self.finished
        assert finished is not None, "not finished"
        ended = generation_pb2.ChoiceFinished(
            choice_index=self.index,
            reason=FINISH_REASONS[finished.reason],
            output_tokens=finished.num_output_tokens,
            window_replays=self.window_replays,
            approximate_replays=self.approximate_replays,
            first_approximate_token_index=self.first_approximate,
        )
        if finished.matched_token_id is not None:
            ended.token_id = finished.matched_token_id
        elif self.log.matched_stop is not None:
            ended.stop_string = self.log.matched_stop
        return generation_pb2.GenerationEvent(choice_finished=ended)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """The shell's side of one request. The engine writes it, streams read it."""

    accepted: AcceptedRequest
    choices: tuple[Choice, ...]
    digest: bytes
    model_name: str
    tenant: str = ""
    times: RequestTimes
    preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission (rule H9)."""
    has_spoken: bool = False
    """Whether the first token was made."""
    is_over: bool = False
    """Whether every choice has ended and nothing is added any more."""
    error: ApiError | None = None
    prompt_logprobs: PromptLogprobLog = field(default_factory=PromptLogprobLog)
    subscriptions: list[Subscription] = field(default_factory=list["Subscription"])

    def __post_init__(self) -> None:
        for choice in self.choices:
            choice.live = self

    def part(self) -> None:
        """Takes the request out of its choices once it has ended and nobody can find it: no cycle is left.

        Memory would have to wait for the collector otherwise, which seldom looks at what has lived for long.
        """
        for choice in self.choices:
            del choice.live

    @property
    def key(self) -> RequestKey:
        """Names the request in this process: its first choice's key. Grows with acceptance."""
        return self.choices[0].key

    @property
    def has_news(self) -> bool:
        """Whether a new reader has something to read already."""
        return bool(self.times.admitted_ns) or self.is_over

    @property
    def num_output_tokens(self) -> int:
        """Delivered by all choices."""
        return sum(len(choice.log.token_ids) for choice in self.choices)

    @property
    def phase(self) -> generation_pb2.Keepalive.Phase.ValueType:
        """For keepalives."""
        if not self.times.admitted_ns:
            return generation_pb2.Keepalive.PHASE_QUEUED
        if not self.has_spoken:
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

    def finished_event(self) -> generation_pb2.GenerationEvent:
        """The end of a request that did not fail."""
        usage = generation_pb2.Usage(
            prompt_tokens=len(self.accepted.prompt_token_ids),
            cached_prompt_tokens=self.num_cached_tokens,
            output_tokens=self.num_output_tokens,
        )
        final = generation_pb2.GenerationFinished(usage=usage, timings=self.times.to_proto(self.preemptions))
        return generation_pb2.GenerationEvent(finished=final)


def now_ns() -> int:
    """The scheduler's monotonic clock."""
    return time.monotonic_ns()
