"""Turns a GenerateRequest into an `AcceptedRequest`, or says which field is wrong. Nothing is ignored.

Order of checks: fields alone, then the prompt, then lengths; all faults of a stage are reported together.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from stepahead.scheduler.constraints.spec import ConstraintSpec
from stepahead.scheduler.core import SamplingSpec
from stepahead.scheduler.errors import FieldViolation, InvalidRequest, NotFound
from stepahead.scheduler.field_checks import (
    Violations,
    check_logprobs,
    check_num_choices,
    check_output,
    check_request_id,
    check_sampling,
    check_scheduling,
    check_stopping,
    constraint_spec,
)
from stepahead.scheduler.prompt_input import prompt_token_ids
from stepahead.scheduler.served_model import ServedModel
from stepahead.v1 import generation_pb2

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (rule J9)."""


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
    approximate_replay_tokens: int
    timeout_ms: int | None
    queue_timeout_ms: int | None
    reattach_window_ms: int
    num_choices: int
    constraint: ConstraintSpec | None
    applied_sampling: generation_pb2.SamplingParams
    applied_stopping: generation_pb2.StoppingParams


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
    violations = Violations()
    check_request_id(request.request_id, violations)
    constraint = constraint_spec(request, model, violations)
    check_num_choices(request, violations)
    check_logprobs(request.logprobs, violations)
    check_sampling(request.sampling, model, violations)
    check_stopping(request.stopping, model, violations)
    check_output(request.output, model, violations)
    check_scheduling(request, model, violations, has_priorities=has_priorities)
    violations.raise_any()
    prompt = await prompt_token_ids(request, model)
    stopping = request.stopping
    max_tokens = _max_tokens(stopping, len(prompt), model, default_max_tokens)
    if stopping.min_tokens > max_tokens:
        text = f"{stopping.min_tokens} is more than max_tokens {max_tokens}"
        raise InvalidRequest([FieldViolation("stopping.min_tokens", text)])
    return _accepted(request, model, prompt, max_tokens, constraint)


def _accepted(
    request: generation_pb2.GenerateRequest,
    model: ServedModel,
    prompt: list[int],
    max_tokens: int,
    constraint: ConstraintSpec | None,
) -> AcceptedRequest:
    """Every default filled in; nothing is wrong any more."""
    stopping, output = request.stopping, request.output
    stop_ids = frozenset(stopping.stop_token_ids)
    sampling = _sampling_spec(request, model)
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
        approximate_replay_tokens=request.scheduling.approximate_replay_tokens,
        timeout_ms=request.scheduling.timeout_ms or None,
        queue_timeout_ms=request.scheduling.queue_timeout_ms or None,
        reattach_window_ms=request.scheduling.reattach_window_ms,
        num_choices=request.num_choices if request.HasField("num_choices") else 1,
        constraint=constraint,
        applied_sampling=_applied_sampling(sampling, request.sampling),
        applied_stopping=_applied_stopping(stopping, max_tokens),
    )


def _applied_sampling(spec: SamplingSpec, asked: generation_pb2.SamplingParams) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed,
        repetition_penalty=spec.repetition_penalty,
        frequency_penalty=spec.frequency_penalty,
        presence_penalty=spec.presence_penalty,
        logit_bias=asked.logit_bias,
        bad_words=asked.bad_words,
        allowed_token_ids=asked.allowed_token_ids,
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


def _sampling_spec(request: generation_pb2.GenerateRequest, model: ServedModel) -> SamplingSpec:
    sampling, logprobs, defaults = request.sampling, request.logprobs, model.defaults
    temperature = sampling.temperature if sampling.HasField("temperature") else defaults.temperature
    return SamplingSpec(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else defaults.top_p,
        top_k=max(0, sampling.top_k) if sampling.HasField("top_k") else defaults.top_k,
        min_p=sampling.min_p if sampling.HasField("min_p") else defaults.min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias if entry.bias),
        bad_words=tuple(tuple(word.ids) for word in sampling.bad_words),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        logprobs_top_k=logprobs.output_top_k if logprobs.HasField("output_top_k") else None,
        prompt_logprobs_top_k=logprobs.prompt_top_k if logprobs.HasField("prompt_top_k") else None,
        processed_logprobs=logprobs.kind == generation_pb2.LogprobParams.KIND_PROCESSED,
    )
