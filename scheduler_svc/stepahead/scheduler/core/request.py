"""What a client asked for, and the states a request passes through."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stepahead.scheduler.core.ids import RequestKey


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """Accepted, never admitted."""
    RUNNING = "running"
    """Holds a slot."""
    PREEMPTED = "preempted"
    """Lost its slot, waits to be admitted again with its whole history."""
    FINISHED = "finished"


class LifecycleEvent(Enum):
    """The only lifecycle verbs."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"


TRANSITIONS: dict[RequestStatus, dict[LifecycleEvent, RequestStatus]] = {
    RequestStatus.WAITING: {
        LifecycleEvent.ADMIT: RequestStatus.RUNNING,
        LifecycleEvent.FINISH: RequestStatus.FINISHED,
    },
    RequestStatus.RUNNING: {
        LifecycleEvent.PREEMPT: RequestStatus.PREEMPTED,
        LifecycleEvent.FINISH: RequestStatus.FINISHED,
    },
    RequestStatus.PREEMPTED: {
        LifecycleEvent.ADMIT: RequestStatus.RUNNING,
        LifecycleEvent.FINISH: RequestStatus.FINISHED,
    },
    RequestStatus.FINISHED: {},
}
"""Every legal transition; what is not listed is a bug in the core, never an operating error."""


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How the worker samples, with every default filled in. The core only carries it."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    """Not sampled while the output index is below the request's min_tokens."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """If not empty, nothing else is sampled."""
    logprobs_top_k: int | None = None
    """Log probabilities of outputs: best ids beside the sampled one; None: none at all."""
    prompt_logprobs_top_k: int | None = None
    """As logprobs_top_k, for the prompt."""
    processed_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, validated by the shell. Immutable."""

    key: RequestKey
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Output tokens, 1 and up; the context limit may end the request earlier."""
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the request (end-of-sequence ids included unless ignored)."""
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    priority: int = 0
    """Higher goes first, is preempted last; only with Ordering.PRIORITY."""
    tenant: str = ""
    """Whose service it is; only with Ordering.FAIR."""
    cache_salt: str = ""
    """Requests with different salts never share cached blocks."""
    constrained: bool = False
    """Whether each of its samples waits for a mask; see `Scheduler.gate_rows`."""
    recompute_prompt: bool = False
    """Whether its prompt is fed whole even if blocks of it are cached: somebody wants what comes out (rule H8)."""
    approximate_replay_tokens: int = 0
    """How many positions a replay of window layers feeds at most, rounded up to whole blocks, although exact states
    take more; 0, or less than a window: as many as it takes."""
    fork_of: RequestKey | None = None
    """A request with the same prompt and salt (another choice of one question): if it is running, its prompt is
    shared to the last position instead of being fed again."""
    deadline_ns: int | None = None
    """On the clock the shell passes to `Scheduler.expire`."""
    queue_deadline_ns: int | None = None
    """As deadline_ns, but only while the request was never admitted."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids must not be empty")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be 0 to max_tokens, not {self.min_tokens}")
        if self.approximate_replay_tokens < 0:
            raise ValueError(f"approximate_replay_tokens must be 0 or more, not {self.approximate_replay_tokens}")
        if self.approximate_replay_tokens and self.recompute_prompt:
            raise ValueError("approximate_replay_tokens and recompute_prompt contradict each other")
