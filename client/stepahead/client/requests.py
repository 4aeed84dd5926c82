"""One generation request as a Python value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypedDict, Unpack, cast

from stepahead.client.values import ChatMessage

ChatTurn: TypeAlias = ChatMessage | Mapping[str, str]
# Text, token ids, or a conversation whose turns are ChatMessage or {"role": ..., "content": ...}.
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatTurn]
# A JSON Schema as its text or as the object that the text means.
JsonSchema: TypeAlias = str | Mapping[str, Any]

DEFAULT_REATTACH_WINDOW_S = 30.0


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; GenerationRequest says what each means."""

    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    include_stop_in_output: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[Sequence[int]]
    allowed_token_ids: Sequence[int]
    json_schema: JsonSchema | None
    json_object: bool
    regex: str | None
    grammar: str | None
    choices: Sequence[str]
    num_choices: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    processed_logprobs: bool
    text: bool | None
    token_ids: bool | None
    skip_special_tokens: bool | None
    final_only: bool
    request_id: str
    model: str
    priority: int | None
    cache_salt: str
    approximate_replay_tokens: int | None
    queue_timeout: float | None
    timeout: float | None
    reattach_window: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request. None leaves a choice to the model's or the server's default; zero means zero.

    When to end: `max_tokens`, `min_tokens`, `stop` (texts), `stop_token_ids` and `ignore_eos`.

    How to draw: `temperature` 0 is greedy; `top_p`, `top_k`, `min_p` narrow the draw, `seed` makes it repeatable.
    The penalties discourage what has occurred; `logit_bias` is added to the logits of ids, `bad_words` are
    sequences of ids that never appear, and only `allowed_token_ids` are drawn if there are any.

    What may come out, one of: `json_schema` (its text, or a mapping), `json_object` (any JSON object), `regex`,
    `grammar` (Lark notation), `choices` (one of these texts).

    What to deliver: `num_choices` independent answers, `text` and `token_ids`, `final_only` in one piece at the
    end. `logprobs` and `prompt_logprobs` ask for log probabilities: of each output or prompt token and of this many
    best ones (0: of the token only); `processed_logprobs` means the distribution that was drawn from.

    How to run it: a higher `priority` goes first, requests with different `cache_salt` share no cached prefix.
    `approximate_replay_tokens` bounds what is fed again for sliding windows that a preemption, a lost worker or a
    cached prefix leaves without their states; an answer that is no longer exact then says so (see `Choice`).
    `queue_timeout` and `timeout` are seconds: waiting for admission, and the whole request. After a lost connection
    the client goes on within `reattach_window` seconds (None: 30), for which the server keeps the request; 0 turns
    that off. A `request_id` is made if none is given; the same id with the same body means the same request, even
    in that time after its end.
    """

    prompt: Prompt
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_in_output: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] = ()
    json_schema: JsonSchema | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choices: Sequence[str] = ()
    num_choices: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False
    text: bool | None = None
    token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    final_only: bool = False
    request_id: str = ""
    model: str = ""
    priority: int | None = None
    cache_salt: str = ""
    approximate_replay_tokens: int | None = None
    queue_timeout: float | None = None
    timeout: float | None = None
    reattach_window: float | None = None


def make_request(prompt: Prompt | GenerationRequest, **options: Unpack[GenerateOptions]) -> GenerationRequest:
    """A request from a prompt and options; options given beside a ready request replace its own."""
    if isinstance(prompt, GenerationRequest):
        return replace(prompt, **options)
    return GenerationRequest(prompt=prompt, **options)


def with_default_timeout(request: GenerationRequest, timeout: float | None) -> GenerationRequest:
    """The request, with a client's timeout if it has none of its own."""
    return request if request.timeout is not None or timeout is None else replace(request, timeout=timeout)


def is_chat(prompt: object) -> bool:
    """Whether a prompt is a conversation."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    turns = cast(Sequence[object], prompt)
    return len(turns) > 0 and isinstance(turns[0], ChatMessage | Mapping)


def prompt_token_ids(prompt: Prompt) -> Sequence[int]:
    """The ids of a prompt that was given as ids; else nothing."""
    return () if isinstance(prompt, str) or is_chat(prompt) else cast(Sequence[int], prompt)
