"""Turns a GenerateRequest into an `AcceptedRequest`, or says which field is wrong. Nothing is ignored.

Order of checks: fields alone, then the prompt, then lengths; all faults of a stage are reported together.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepahead.scheduler.core import SamplingSpec
from stepahead.scheduler.errors import FieldViolation, InvalidRequest, NotFound
from stepahead.scheduler.served_model import (
    MAX_NUM_CHOICES,
    MAX_PROMPT_BYTES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ServedModel,
)
from stepahead.scheduler.text.chat_template import ChatTurn
from stepahead.scheduler.text.errors import TextError
from stepahead.v1 import generation_pb2

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (rule J9)."""
MAX_CHAT_MESSAGES = 4096
"""Millions of empty messages fit a request, and looking at each would hold the loop that plans steps."""
MAX_CACHE_SALT_BYTES = 256
MAX_PRIORITY = 1000
THREADED_ABOVE_BYTES = 8 * 1024
"""Longer prompts are tokenized in a thread: the loop also plans steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """A request with every default filled in."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSpec
    max_tokens: int
    min_tokens: int
    stop_strings: tuple[str, ...]
    include_stop_in_output: bool
    stop_token_ids: frozenset[int]
    """End-of-sequence ids included unless ignored."""
    want_text: bool
    want_token_ids: bool
    skip_special_tokens: bool
    final_only: bool
    priority: int
    cache_salt: str
    timeout_ms: int | None
    queue_timeout_ms: int | None
    applied_sampling: generation_pb2.SamplingParams
    applied_stopping: generation_pb2.StoppingParams


class _Violations(list[FieldViolation]):
    def add(self, field: str, description: str) -> None:
        self.append(FieldViolation(field, description))

    def check(self, ok: bool, field: str, description: str) -> None:  # noqa: FBT001 - reads like assert
        if not ok:
            self.add(field, description)

    def raise_any(self) -> None:
        if self:
            raise InvalidRequest(list(self))


def check_model(name: str, model: ServedModel) -> None:
    """Raises NotFound unless `name` is empty or the served model."""
    if name and name != model.name:
        raise NotFound("model", name, f"model: unknown model {name[:128]!r}; this server serves {model.name!r}")


async def validate(
    request: generation_pb2.GenerateRequest,
    model: ServedModel,
    *,
    default_max_tokens: int,
    has_priorities: bool = False,
) -> AcceptedRequest:
    """See the module docstring.

    Raises:
        InvalidRequest: naming every wrong field of the first stage that has one.
        NotFound: another model is asked for.
    """
    check_model(request.model, model)
    violations = _Violations()
    _check_request_id(request.request_id, violations)
    _check_unsupported(request, violations)
    _check_sampling(request.sampling, violations)
    _check_stopping(request.stopping, model, violations)
    _check_output(request.output, model, violations)
    _check_scheduling(request.scheduling, violations, has_priorities=has_priorities)
    violations.raise_any()
    prompt = await prompt_token_ids(request, model)
    stopping = request.stopping
    max_tokens = _max_tokens(stopping, len(prompt), model, default_max_tokens)
    if stopping.min_tokens > max_tokens:
        text = f"{stopping.min_tokens} is more than max_tokens {max_tokens}"
        raise InvalidRequest([FieldViolation("stopping.min_tokens", text)])
    return _accepted(request, model, prompt, max_tokens)


def _accepted(
    request: generation_pb2.GenerateRequest, model: ServedModel, prompt: list[int], max_tokens: int
) -> AcceptedRequest:
    """Every default filled in; nothing is wrong any more."""
    stopping, output = request.stopping, request.output
    stop_ids = frozenset(stopping.stop_token_ids)
    sampling = _sampling_spec(request.sampling, model)
    if stopping.min_tokens:
        # The real ids, ignored or not: until min_tokens no token may look like an end (rule J6).
        suppressed = tuple(sorted(stop_ids | model.eos_token_ids))
        sampling = replace(sampling, suppressed_token_ids=suppressed)
    return AcceptedRequest(
        request_id=request.request_id or f"req-{secrets.token_hex(8)}",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_strings=tuple(stopping.stop_strings),
        include_stop_in_output=stopping.include_stop_in_output,
        stop_token_ids=stop_ids if stopping.ignore_eos else stop_ids | model.eos_token_ids,
        want_text=model.codec is not None and (not output.HasField("text") or output.text),
        want_token_ids=not output.HasField("token_ids") or output.token_ids,
        skip_special_tokens=not output.HasField("skip_special_tokens") or output.skip_special_tokens,
        final_only=output.delivery == generation_pb2.OutputParams.DELIVERY_FINAL_ONLY,
        priority=request.scheduling.priority,
        cache_salt=request.scheduling.cache_salt,
        timeout_ms=request.scheduling.timeout_ms or None,
        queue_timeout_ms=request.scheduling.queue_timeout_ms or None,
        applied_sampling=generation_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
        applied_stopping=_applied_stopping(stopping, max_tokens),
    )


def _applied_stopping(stopping: generation_pb2.StoppingParams, max_tokens: int) -> generation_pb2.StoppingParams:
    return generation_pb2.StoppingParams(
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_strings=stopping.stop_strings,
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
        include_stop_in_output=stopping.include_stop_in_output,
    )


# ---------------------------------------------------------------------------------------------- stages


def _check_request_id(request_id: str, violations: _Violations) -> None:
    violations.check(len(request_id) <= 128, "request_id", "is longer than 128 characters")
    violations.check(
        all("!" <= char <= "~" for char in request_id), "request_id", "must be printable ASCII without spaces"
    )


def _check_unsupported(request: generation_pb2.GenerateRequest, violations: _Violations) -> None:
    sampling, scheduling = request.sampling, request.scheduling
    if request.HasField("num_choices"):
        violations.check(request.num_choices >= 1, "num_choices", "must be at least 1")
        violations.check(
            request.num_choices <= MAX_NUM_CHOICES, "num_choices", "more than one choice is not served yet"
        )
    unsupported: list[tuple[bool, str]] = [
        (request.HasField("constraint"), "constraint"),
        (request.HasField("logprobs"), "logprobs"),
        (
            sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
            "sampling.repetition_penalty",
        ),
        (sampling.frequency_penalty != 0, "sampling.frequency_penalty"),
        (sampling.presence_penalty != 0, "sampling.presence_penalty"),
        (bool(sampling.logit_bias), "sampling.logit_bias"),
        (bool(sampling.bad_words), "sampling.bad_words"),
        (bool(sampling.allowed_token_ids), "sampling.allowed_token_ids"),
        (scheduling.reattach_window_ms != 0, "scheduling.reattach_window_ms"),
    ]
    for is_set, field in unsupported:
        violations.check(not is_set, field, "is not served yet")


def _check_sampling(sampling: generation_pb2.SamplingParams, violations: _Violations) -> None:
    ranges: list[tuple[str, Callable[[float], bool], str]] = [
        ("temperature", lambda value: 0 <= value <= 100, "from 0 to 100"),
        ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
        ("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
    ]
    for name, in_range, text in ranges:
        if sampling.HasField(name):  # type: ignore[arg-type]  # names of optional fields
            value: float = getattr(sampling, name)
            violations.check(
                math.isfinite(value) and in_range(value), f"sampling.{name}", f"must be {text}, not {value:g}"
            )
    if sampling.HasField("top_k"):
        violations.check(sampling.top_k >= -1, "sampling.top_k", f"must be -1 or more, not {sampling.top_k}")


def _check_stopping(stopping: generation_pb2.StoppingParams, model: ServedModel, violations: _Violations) -> None:
    if stopping.HasField("max_tokens"):
        violations.check(stopping.max_tokens >= 1, "stopping.max_tokens", "must be at least 1, not 0")
    strings, ids = stopping.stop_strings, stopping.stop_token_ids
    violations.check(
        len(strings) <= MAX_STOP_STRINGS, "stopping.stop_strings", f"more than {MAX_STOP_STRINGS} strings"
    )
    violations.check(not strings or model.codec is not None, "stopping.stop_strings", "the model has no tokenizer")
    for index, string in enumerate(strings[:MAX_STOP_STRINGS]):
        size = len(string.encode())
        violations.check(
            1 <= size <= MAX_STOP_STRING_BYTES,
            f"stopping.stop_strings[{index}]",
            f"must be 1 to {MAX_STOP_STRING_BYTES} bytes, not {size}",
        )
    violations.check(
        len(ids) <= MAX_STOP_TOKEN_IDS, "stopping.stop_token_ids", f"more than {MAX_STOP_TOKEN_IDS} ids"
    )
    _check_ids(list(ids[:MAX_STOP_TOKEN_IDS]), "stopping.stop_token_ids", model, violations)


def _check_output(output: generation_pb2.OutputParams, model: ServedModel, violations: _Violations) -> None:
    violations.check(
        not output.text or model.codec is not None, "output.text", "the model has no tokenizer: no text"
    )
    no_text = model.codec is None or (output.HasField("text") and not output.text)
    no_token_ids = output.HasField("token_ids") and not output.token_ids
    violations.check(not (no_text and no_token_ids), "output", "neither text nor token ids can be delivered")
    violations.check(output.delivery in (0, 1, 2), "output.delivery", f"unknown value {output.delivery}")


def _check_scheduling(
    scheduling: generation_pb2.SchedulingParams, violations: _Violations, *, has_priorities: bool
) -> None:
    priority = scheduling.priority
    if not has_priorities:
        violations.check(priority == 0, "scheduling.priority", "needs a server with --ordering priority")
    violations.check(
        abs(priority) <= MAX_PRIORITY, "scheduling.priority", f"must be -{MAX_PRIORITY} to {MAX_PRIORITY}"
    )
    size = len(scheduling.cache_salt.encode())
    violations.check(
        size <= MAX_CACHE_SALT_BYTES,
        "scheduling.cache_salt",
        f"{size} bytes are more than {MAX_CACHE_SALT_BYTES}",
    )
    for name in ("timeout_ms", "queue_timeout_ms"):
        if scheduling.HasField(name):
            violations.check(getattr(scheduling, name) >= 1, f"scheduling.{name}", "must be at least 1")


def _check_ids(ids: list[int], field: str, model: ServedModel, violations: _Violations) -> None:
    """Names the first id that is not below the logits width (rule J11)."""
    if ids and max(ids) >= model.vocab_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= model.vocab_size)
        violations.add(f"{field}[{index}]", f"{ids[index]} is not below the vocabulary size {model.vocab_size}")


async def prompt_token_ids(
    request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, model: ServedModel
) -> list[int]:
    """The prompt as token ids.

    Raises:
        InvalidRequest: no input, too large, not encodable, ids out of range, or empty.
    """
    kind = request.WhichOneof("input")
    violations = _Violations()
    if kind is None:
        names = "text, chat or token_ids" if isinstance(request, generation_pb2.GenerateRequest) else "text or chat"
        violations.add("input", f"one of {names} is required")
    elif kind == "token_ids" and isinstance(request, generation_pb2.GenerateRequest):
        ids = list(request.token_ids.ids)
        violations.check(bool(ids), "token_ids.ids", "is empty; a prompt needs at least one token")
        _check_ids(ids, "token_ids.ids", model, violations)
        violations.raise_any()
        return ids
    elif model.codec is None:
        violations.add(kind, "the model has no tokenizer; send token_ids")
    violations.raise_any()
    ids = await (_encode_text(request.text, model) if kind == "text" else _encode_chat(request.chat, model))
    if not ids:
        raise InvalidRequest([FieldViolation(str(kind), "gives no token; a prompt needs at least one")])
    return ids


async def _encode_text(text: str, model: ServedModel) -> list[int]:
    size = len(text.encode())
    if not text:
        raise InvalidRequest([FieldViolation("text", "is empty")])
    _check_size("text", size)
    assert model.codec is not None
    codec = model.codec
    return await _encode("text", size, lambda: codec.encode(text))


async def _encode_chat(chat: generation_pb2.ChatInput, model: ServedModel) -> list[int]:
    violations = _Violations()
    violations.check(bool(chat.messages), "chat.messages", "is empty")
    count = len(chat.messages)
    violations.check(count <= MAX_CHAT_MESSAGES, "chat.messages", f"{count} are more than {MAX_CHAT_MESSAGES}")
    violations.raise_any()
    for index, message in enumerate(chat.messages):
        violations.check(1 <= len(message.role) <= 64, f"chat.messages[{index}].role", "must be 1 to 64 characters")
    violations.raise_any()
    size = sum(len(message.role.encode()) + len(message.content.encode()) for message in chat.messages)
    _check_size("chat", size)
    assert model.codec is not None
    codec = model.codec
    turns = [ChatTurn(message.role, message.content) for message in chat.messages]
    opening = not chat.HasField("add_generation_prompt") or chat.add_generation_prompt
    return await _encode("chat", size, lambda: codec.encode_chat(turns, add_generation_prompt=opening))


def _check_size(field: str, size: int) -> None:
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(
            [FieldViolation(field, f"{size} bytes are more than the limit of {MAX_PROMPT_BYTES}")],
            metadata={"limit": str(MAX_PROMPT_BYTES), "actual": str(size)},
        )


async def _encode(field: str, size: int, encode: Callable[[], list[int]]) -> list[int]:
    try:
        if size > THREADED_ABOVE_BYTES:
            return await asyncio.get_running_loop().run_in_executor(None, encode)
        return encode()
    except TextError as error:
        raise InvalidRequest([FieldViolation(field, str(error))]) from error


def _max_tokens(
    stopping: generation_pb2.StoppingParams, num_prompt_tokens: int, model: ServedModel, default: int
) -> int:
    """Output tokens; a prompt that leaves no room for one is refused with both numbers (rule V2)."""
    room = model.max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidRequest(
            [
                FieldViolation(
                    "input",
                    f"the prompt has {num_prompt_tokens} tokens, the limit is {model.max_model_len - 1} "
                    f"(max_model_len {model.max_model_len} less one output token)",
                )
            ],
            metadata={"limit": str(model.max_model_len - 1), "actual": str(num_prompt_tokens)},
        )
    if not stopping.HasField("max_tokens"):
        return min(room, default)
    if stopping.max_tokens > room:
        raise InvalidRequest(
            [
                FieldViolation(
                    "stopping.max_tokens",
                    f"{stopping.max_tokens} and a prompt of {num_prompt_tokens} tokens are more than "
                    f"max_model_len {model.max_model_len}; at most {room} fit",
                )
            ],
            metadata={"limit": str(room), "actual": str(stopping.max_tokens)},
        )
    return stopping.max_tokens


def _sampling_spec(sampling: generation_pb2.SamplingParams, model: ServedModel) -> SamplingSpec:
    defaults = model.defaults
    temperature = sampling.temperature if sampling.HasField("temperature") else defaults.temperature
    return SamplingSpec(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else defaults.top_p,
        top_k=max(0, sampling.top_k) if sampling.HasField("top_k") else defaults.top_k,
        min_p=sampling.min_p if sampling.HasField("min_p") else defaults.min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
    )
