"""Checks of single fields. Every fault names its field; nothing is changed and nothing is looked up."""

from __future__ import annotations

import math
from collections.abc import Callable

from stepahead.scheduler.constraints.errors import ConstraintInvalid
from stepahead.scheduler.constraints.spec import ConstraintKind, ConstraintSpec
from stepahead.scheduler.errors import FieldViolation, InvalidRequest
from stepahead.scheduler.served_model import (
    MAX_NUM_CHOICES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ServedModel,
)
from stepahead.v1 import generation_pb2

MAX_CACHE_SALT_BYTES = 256
MAX_PRIORITY = 1000
MAX_REATTACH_WINDOW_MS = 600_000
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_IDS = 64
MAX_TOP_LOGPROBS = 20


class Violations(list[FieldViolation]):
    """The faults of a stage, reported together."""

    def add(self, field: str, description: str) -> None:
        """Adds a fault."""
        self.append(FieldViolation(field, description))

    def check(self, ok: bool, field: str, description: str) -> None:  # noqa: FBT001 - reads like assert
        """Adds a fault unless `ok`."""
        if not ok:
            self.add(field, description)

    def raise_any(self) -> None:
        """Raises InvalidRequest if there is a fault."""
        if self:
            raise InvalidRequest(list(self))


def check_request_id(request_id: str, violations: Violations) -> None:
    """Printable ASCII of bounded length."""
    violations.check(len(request_id) <= 128, "request_id", "is longer than 128 characters")
    violations.check(
        all("!" <= char <= "~" for char in request_id), "request_id", "must be printable ASCII without spaces"
    )


def check_num_choices(request: generation_pb2.GenerateRequest, violations: Violations) -> None:
    """1 up to the limit."""
    if request.HasField("num_choices"):
        violations.check(
            1 <= request.num_choices <= MAX_NUM_CHOICES,
            "num_choices",
            f"must be 1 to {MAX_NUM_CHOICES}, not {request.num_choices}",
        )


def constraint_spec(
    request: generation_pb2.GenerateRequest, model: ServedModel, violations: Violations
) -> ConstraintSpec | None:
    """The constraint with its sizes checked; what it says is checked where it is compiled."""
    if not request.HasField("constraint"):
        return None
    constraint = request.constraint
    kind = constraint.WhichOneof("kind")
    if kind is None:
        violations.add("constraint", f"one of {', '.join(ConstraintKind)} is required")
        return None
    violations.check(model.codec is not None, f"constraint.{kind}", "the model has no tokenizer")
    violations.check(
        not request.stopping.ignore_eos, "stopping.ignore_eos", "a constraint decides where the text ends"
    )
    violations.check(kind != "json_object" or constraint.json_object, "constraint.json_object", "must be true")
    texts: dict[str, Callable[[], tuple[str, ...]]] = {
        "json_schema": lambda: (constraint.json_schema,),
        "regex": lambda: (constraint.regex,),
        "grammar": lambda: (constraint.grammar,),
        "choices": lambda: tuple(constraint.choices.choices),
        "json_object": lambda: (),
    }
    try:
        return ConstraintSpec(ConstraintKind(kind), texts[kind]())
    except ConstraintInvalid as error:
        violations.add(error.field, error.description)
        return None


def check_logprobs(logprobs: generation_pb2.LogprobParams, violations: Violations) -> None:
    """Sizes of the lists, and what they describe."""
    for name in ("output_top_k", "prompt_top_k"):
        value: int = getattr(logprobs, name)
        violations.check(
            value <= MAX_TOP_LOGPROBS, f"logprobs.{name}", f"must be 0 to {MAX_TOP_LOGPROBS}, not {value}"
        )
    known = generation_pb2.LogprobParams.Kind.values()
    violations.check(logprobs.kind in known, "logprobs.kind", f"unknown value {logprobs.kind}")


def check_sampling(sampling: generation_pb2.SamplingParams, model: ServedModel, violations: Violations) -> None:
    """Everything about drawing tokens; ids are checked against the logits width (rule J11)."""
    ranges: list[tuple[str, Callable[[float], bool], str]] = [
        ("temperature", lambda value: 0 <= value <= 100, "from 0 to 100"),
        ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
        ("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
        ("repetition_penalty", lambda value: 0 < value <= 100, "above 0 and at most 100"),
        ("frequency_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
        ("presence_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
    ]
    for name, in_range, text in ranges:
        if sampling.HasField(name):  # type: ignore[arg-type]  # names of optional fields
            value: float = getattr(sampling, name)
            violations.check(
                math.isfinite(value) and in_range(value), f"sampling.{name}", f"must be {text}, not {value:g}"
            )
    if sampling.HasField("top_k"):
        violations.check(sampling.top_k >= -1, "sampling.top_k", f"must be -1 or more, not {sampling.top_k}")
    _check_biases(sampling, model, violations)
    _check_bad_words(sampling, model, violations)
    allowed = sampling.allowed_token_ids
    violations.check(
        len(allowed) <= model.vocab_size,
        "sampling.allowed_token_ids",
        f"{len(allowed)} ids are more than the vocabulary has",
    )
    check_ids(list(allowed[: model.vocab_size]), "sampling.allowed_token_ids", model, violations)


def _check_biases(sampling: generation_pb2.SamplingParams, model: ServedModel, violations: Violations) -> None:
    biases = sampling.logit_bias
    field = "sampling.logit_bias"
    violations.check(len(biases) <= MAX_LOGIT_BIASES, field, f"more than {MAX_LOGIT_BIASES} entries")
    seen: set[int] = set()
    for index, entry in enumerate(biases[:MAX_LOGIT_BIASES]):
        violations.check(
            entry.token_id < model.vocab_size,
            f"{field}[{index}].token_id",
            f"{entry.token_id} is not below the vocabulary size {model.vocab_size}",
        )
        violations.check(
            entry.token_id not in seen, f"{field}[{index}].token_id", f"{entry.token_id} has two biases"
        )
        seen.add(entry.token_id)
        violations.check(
            math.isfinite(entry.bias) and abs(entry.bias) <= 100,
            f"{field}[{index}].bias",
            f"must be from -100 to 100, not {entry.bias:g}",
        )


def _check_bad_words(sampling: generation_pb2.SamplingParams, model: ServedModel, violations: Violations) -> None:
    field = "sampling.bad_words"
    violations.check(len(sampling.bad_words) <= MAX_BAD_WORDS, field, f"more than {MAX_BAD_WORDS} sequences")
    for index, word in enumerate(sampling.bad_words[:MAX_BAD_WORDS]):
        size = len(word.ids)
        violations.check(
            1 <= size <= MAX_BAD_WORD_IDS,
            f"{field}[{index}].ids",
            f"must be 1 to {MAX_BAD_WORD_IDS} ids, not {size}",
        )
        check_ids(list(word.ids[:MAX_BAD_WORD_IDS]), f"{field}[{index}].ids", model, violations)


def check_stopping(stopping: generation_pb2.StoppingParams, model: ServedModel, violations: Violations) -> None:
    """What does not depend on the prompt."""
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
    check_ids(list(ids[:MAX_STOP_TOKEN_IDS]), "stopping.stop_token_ids", model, violations)


def check_output(output: generation_pb2.OutputParams, model: ServedModel, violations: Violations) -> None:
    """Something must be delivered."""
    violations.check(
        not output.text or model.codec is not None, "output.text", "the model has no tokenizer: no text"
    )
    no_text = model.codec is None or (output.HasField("text") and not output.text)
    no_token_ids = output.HasField("token_ids") and not output.token_ids
    violations.check(not (no_text and no_token_ids), "output", "neither text nor token ids can be delivered")
    violations.check(output.delivery in (0, 1, 2), "output.delivery", f"unknown value {output.delivery}")


def check_scheduling(
    request: generation_pb2.GenerateRequest, model: ServedModel, violations: Violations, *, has_priorities: bool
) -> None:
    """Queueing and lifetime."""
    scheduling = request.scheduling
    priority = scheduling.priority
    if abs(priority) > MAX_PRIORITY:
        violations.add("scheduling.priority", f"must be -{MAX_PRIORITY} to {MAX_PRIORITY}, not {priority}")
    elif priority and not has_priorities:
        violations.add("scheduling.priority", "needs a server with --ordering priority")
    size = len(scheduling.cache_salt.encode())
    violations.check(
        size <= MAX_CACHE_SALT_BYTES,
        "scheduling.cache_salt",
        f"{size} bytes are more than {MAX_CACHE_SALT_BYTES}",
    )
    violations.check(
        scheduling.reattach_window_ms <= MAX_REATTACH_WINDOW_MS,
        "scheduling.reattach_window_ms",
        f"must be 0 to {MAX_REATTACH_WINDOW_MS}, not {scheduling.reattach_window_ms}",
    )
    if scheduling.approximate_replay_tokens:
        field, least = "scheduling.approximate_replay_tokens", model.largest_window - 1
        violations.check(
            scheduling.approximate_replay_tokens >= least,
            field,
            f"must be at least {least}, the largest window of {model.name} less 1, or 0, "
            f"not {scheduling.approximate_replay_tokens}",
        )
        violations.check(
            not request.logprobs.HasField("prompt_top_k"),
            field,
            "logprobs.prompt_top_k promises exact values: give one of the two",
        )
    for name in ("timeout_ms", "queue_timeout_ms"):
        if scheduling.HasField(name):
            violations.check(getattr(scheduling, name) >= 1, f"scheduling.{name}", "must be at least 1")


def check_ids(ids: list[int], field: str, model: ServedModel, violations: Violations) -> None:
    """Names the first id that is not below the logits width (rule J11)."""
    if ids and max(ids) >= model.vocab_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= model.vocab_size)
        violations.add(f"{field}[{index}]", f"{ids[index]} is not below the vocabulary size {model.vocab_size}")
