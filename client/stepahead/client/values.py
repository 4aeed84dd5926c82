"""What the SDK hands out: frozen values, free of gRPC and protobuf types.

Durations are integers in nanoseconds (`*_ns`), as the server measured them. Token ids are plain integers.
"""

import enum
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class CancelOutcome(enum.StrEnum):
    """What a cancellation found."""

    CANCELLED = "cancelled"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"


class Phase(enum.StrEnum):
    """Where a live request is, as its newest keepalive said."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; roles are those the model's chat template knows."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; None means that the server did not state the value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopping:
    """Stopping parameters as the server applied them; None means that it did not state the value."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    include_stop_in_output: bool | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted to a worker; echoes what was applied."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_prompt_tokens: int
    queue_ns: int
    sampling: Sampling
    stopping: Stopping


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely one token was, as a natural logarithm; rank 1 is the likeliest of the vocabulary.

    `token_id` is None where the stream does not say it: with `token_ids=False`, and in a prompt that was given as
    text. `top` holds the likeliest tokens, best first, as (token id, log probability).
    """

    token_id: int | None
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice: tokens [first_token_index, first_token_index + len(token_ids)) and new text.

    Text may lag the tokens while it could still become a stop string, so either part can be empty. `logprobs` has
    one entry per token if they were asked for.
    """

    choice_index: int
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all choices."""

    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations the scheduler measured, each from the request's acceptance unless said otherwise."""

    queue_ns: int
    first_token_ns: int
    # From the first token to the last.
    decode_ns: int
    total_ns: int
    # Times the request lost its place and was recomputed.
    preemptions: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. `matched` is the stop id or stop string that ended it, if one did.

    `logprobs` has one entry per output token if they were asked for. `window_replays` counts how often the states
    of sliding windows alone were computed again, `approximate_replays` those among them that the request's
    `approximate_replay_tokens` cut short; what they may have changed begins at `first_approximate_token_index`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched: int | str | None
    output_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    window_replays: int = 0
    approximate_replays: int = 0
    first_approximate_token_index: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. The short properties speak of the first choice.

    `prompt_logprobs` has one entry per prompt position if they were asked for; the first is None, since nothing
    comes before it.
    """

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    started: Started
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice (empty if they were not asked for)."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the first choice's tokens (empty if they were not asked for)."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def matched(self) -> int | str | None:
        """The stop id or stop string that ended the first choice, if one did."""
        return self.choices[0].matched


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Limits of the public API; bytes where the name says so, else counts."""

    default_max_tokens: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_num_choices: int
    max_prompt_bytes: int
    max_waiting_requests: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model. Token ids are below `vocab_size`; prompt and output together fit `max_model_len`."""

    model: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    bos_token_id: int | None
    has_chat_template: bool
    has_tokenizer: bool
    tokenizer_sha256: str
    default_sampling: Sampling
    limits: ApiLimits
    eos_token_ids: tuple[int, ...] = field(default=())
