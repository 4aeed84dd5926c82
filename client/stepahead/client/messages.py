"""Builds protocol messages from Python values; field_checks.py says what is refused on the way."""

import uuid
from collections.abc import Mapping, Sequence
from typing import cast

from stepahead.client.errors import FieldViolation, invalid
from stepahead.client.field_checks import INT32_MAX, INT32_MIN, UINT32_MAX, UINT64_MAX, Fields
from stepahead.client.requests import DEFAULT_REATTACH_WINDOW_S, ChatTurn, GenerationRequest, Prompt, is_chat
from stepahead.client.values import ChatMessage
from stepahead.v1 import generation_pb2


def generate_message(request: GenerationRequest) -> generation_pb2.GenerateRequest:
    """The protocol's form of a request.

    A request that can outlive its call gets an id. Every request carries its timeout itself: the server then says
    in which phase it passed, and the call's deadline does not end a request that outlives it. Raises
    InvalidRequestError, before anything is sent, naming every value that does not fit.
    """
    fields = Fields()
    scheduling = _scheduling_message(fields, request)
    request_id = fields.string("request_id", request.request_id)
    if scheduling.reattach_window_ms and not request_id:
        request_id = uuid.uuid4().hex
    message = generation_pb2.GenerateRequest(
        request_id=request_id,
        model=fields.string("model", request.model),
        sampling=_sampling_message(fields, request),
        stopping=_stopping_message(fields, request),
        num_choices=fields.integer("num_choices", request.num_choices, 0, UINT32_MAX),
        constraint=_constraint_message(fields, request),
        logprobs=_logprobs_message(fields, request),
        output=generation_pb2.OutputParams(
            text=fields.flag("output.text", request.text),
            token_ids=fields.flag("output.token_ids", request.token_ids),
            skip_special_tokens=fields.flag("output.skip_special_tokens", request.skip_special_tokens),
            delivery=(
                generation_pb2.OutputParams.DELIVERY_FINAL_ONLY
                if request.final_only
                else generation_pb2.OutputParams.DELIVERY_INCREMENTAL
            ),
        ),
        scheduling=scheduling,
    )
    _set_prompt(fields, message, request.prompt)
    fields.refuse_violations()
    return message


def chat_prompt(messages: Sequence[ChatTurn]) -> Sequence[ChatTurn]:
    """Checks that a prompt is a conversation. Raises InvalidRequestError."""
    if not is_chat(messages):
        raise invalid([FieldViolation("chat.messages", "needs at least one message with role and content")])
    return messages


def tokenize_message(prompt: str | Sequence[ChatTurn], model: str = "") -> generation_pb2.TokenizeRequest:
    """The protocol's form of something to tokenize. Raises InvalidRequestError."""
    fields = Fields()
    message = generation_pb2.TokenizeRequest(model=fields.string("model", model))
    if isinstance(prompt, str):
        message.text = fields.string("text", prompt)
    else:
        message.chat.CopyFrom(_chat_input(fields, prompt))
    fields.refuse_violations()
    return message


def detokenize_message(
    token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, model: str = ""
) -> generation_pb2.DetokenizeRequest:
    """The protocol's form of token ids to turn into text. Raises InvalidRequestError."""
    fields = Fields()
    message = generation_pb2.DetokenizeRequest(
        model=fields.string("model", model),
        token_ids=fields.uint32s("token_ids", token_ids),
        skip_special_tokens=skip_special_tokens,
    )
    fields.refuse_violations()
    return message


def cancel_message(request_ids: Sequence[str]) -> generation_pb2.CancelRequest:
    """The protocol's form of a cancellation. Raises InvalidRequestError."""
    fields = Fields()
    if isinstance(request_ids, str):
        request_ids = (request_ids,)
    message = generation_pb2.CancelRequest(request_ids=fields.strings("request_ids", request_ids))
    fields.refuse_violations()
    return message


def check_timeout(timeout: float | None) -> float | None:
    """A deadline in seconds, above 0. Raises InvalidRequestError for anything else."""
    fields = Fields()
    fields.milliseconds("timeout", timeout)
    fields.refuse_violations()
    return timeout


def _sampling_message(fields: Fields, request: GenerationRequest) -> generation_pb2.SamplingParams:
    biases: Mapping[int, float] = {}
    if isinstance(request.logit_bias, Mapping):
        biases = request.logit_bias
    elif request.logit_bias is not None:
        fields.refuse("sampling.logit_bias", "must be a mapping of token ids to biases")
    bad_words = request.bad_words if fields.is_list("sampling.bad_words", request.bad_words) else ()
    return generation_pb2.SamplingParams(
        temperature=fields.float32("sampling.temperature", request.temperature),
        top_p=fields.float32("sampling.top_p", request.top_p),
        top_k=fields.integer("sampling.top_k", request.top_k, INT32_MIN, INT32_MAX),
        min_p=fields.float32("sampling.min_p", request.min_p),
        repetition_penalty=fields.float32("sampling.repetition_penalty", request.repetition_penalty),
        frequency_penalty=fields.float32("sampling.frequency_penalty", request.frequency_penalty),
        presence_penalty=fields.float32("sampling.presence_penalty", request.presence_penalty),
        logit_bias=[
            generation_pb2.TokenBias(
                token_id=fields.integer(f"sampling.logit_bias[{index}].token_id", token_id, 0, UINT32_MAX) or 0,
                bias=fields.float32(f"sampling.logit_bias[{index}].bias", bias) or 0.0,
            )
            for index, (token_id, bias) in enumerate(biases.items())
        ],
        seed=fields.integer("sampling.seed", request.seed, 0, UINT64_MAX),
        bad_words=[
            generation_pb2.TokenIdsInput(ids=fields.uint32s(f"sampling.bad_words[{index}]", word))
            for index, word in enumerate(bad_words)
        ],
        allowed_token_ids=fields.uint32s("sampling.allowed_token_ids", request.allowed_token_ids),
    )


def _stopping_message(fields: Fields, request: GenerationRequest) -> generation_pb2.StoppingParams:
    stop = (request.stop,) if isinstance(request.stop, str) else request.stop
    return generation_pb2.StoppingParams(
        max_tokens=fields.integer("stopping.max_tokens", request.max_tokens, 0, UINT32_MAX),
        min_tokens=fields.integer("stopping.min_tokens", request.min_tokens, 0, UINT32_MAX),
        stop_strings=fields.strings("stopping.stop_strings", stop),
        stop_token_ids=fields.uint32s("stopping.stop_token_ids", request.stop_token_ids),
        ignore_eos=fields.flag("stopping.ignore_eos", request.ignore_eos),
        include_stop_in_output=fields.flag("stopping.include_stop_in_output", request.include_stop_in_output),
    )


def _constraint_message(fields: Fields, request: GenerationRequest) -> generation_pb2.Constraint | None:
    """At most one way to restrict the output; None without any."""
    given = [
        name
        for name in ("json_schema", "json_object", "regex", "grammar", "choices")
        # An empty text or list was asked for all the same, unless it is the default.
        if getattr(request, name) not in (None, False, ())
    ]
    if len(given) > 1:
        fields.refuse("constraint", f"{' and '.join(given)} exclude each other")
    if not given:
        return None
    path = f"constraint.{given[0]}"
    match given[0]:
        case "json_schema":
            return generation_pb2.Constraint(json_schema=fields.json_text(path, request.json_schema))
        case "json_object":
            return generation_pb2.Constraint(json_object=bool(fields.flag(path, request.json_object)))
        case "regex":
            return generation_pb2.Constraint(regex=fields.string(path, request.regex))
        case "grammar":
            return generation_pb2.Constraint(grammar=fields.string(path, request.grammar))
        case _:
            choices = fields.strings(f"{path}.choices", request.choices)
            return generation_pb2.Constraint(choices=generation_pb2.ChoiceConstraint(choices=choices))


def _logprobs_message(fields: Fields, request: GenerationRequest) -> generation_pb2.LogprobParams:
    processed = fields.flag("logprobs.kind", request.processed_logprobs)
    return generation_pb2.LogprobParams(
        output_top_k=fields.integer("logprobs.output_top_k", request.logprobs, 0, UINT32_MAX),
        prompt_top_k=fields.integer("logprobs.prompt_top_k", request.prompt_logprobs, 0, UINT32_MAX),
        kind=(
            generation_pb2.LogprobParams.KIND_PROCESSED
            if processed
            else generation_pb2.LogprobParams.KIND_UNSPECIFIED
        ),
    )


def _scheduling_message(fields: Fields, request: GenerationRequest) -> generation_pb2.SchedulingParams:
    window_s = DEFAULT_REATTACH_WINDOW_S if request.reattach_window is None else request.reattach_window
    window_ms = fields.milliseconds("scheduling.reattach_window_ms", window_s, zero=True)
    timeout_ms = fields.milliseconds("scheduling.timeout_ms", request.timeout)
    return generation_pb2.SchedulingParams(
        priority=fields.integer("scheduling.priority", request.priority, INT32_MIN, INT32_MAX),
        queue_timeout_ms=fields.milliseconds("scheduling.queue_timeout_ms", request.queue_timeout),
        timeout_ms=timeout_ms,
        reattach_window_ms=window_ms,
        cache_salt=fields.string("scheduling.cache_salt", request.cache_salt),
        approximate_replay_tokens=fields.integer(
            "scheduling.approximate_replay_tokens", request.approximate_replay_tokens, 0, UINT32_MAX
        )
        or 0,
    )


def _set_prompt(fields: Fields, message: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = fields.string("text", prompt)
    elif is_chat(prompt):
        message.chat.CopyFrom(_chat_input(fields, cast(Sequence[ChatTurn], prompt)))
    else:
        # An empty sequence becomes an empty list of ids: the server refuses it by name.
        ids = fields.uint32s("token_ids.ids", cast(Sequence[int], prompt))
        message.token_ids.CopyFrom(generation_pb2.TokenIdsInput(ids=ids))


def _chat_input(fields: Fields, turns: Sequence[ChatTurn]) -> generation_pb2.ChatInput:
    chat = generation_pb2.ChatInput()
    for index, turn in enumerate(cast(Sequence[object], turns)):
        path = f"chat.messages[{index}]"
        if isinstance(turn, ChatMessage):
            role, content = turn.role, turn.content
        elif isinstance(turn, Mapping) and set(keys := cast(Mapping[str, object], turn)) == {"role", "content"}:
            role, content = keys["role"], keys["content"]
        else:
            fields.refuse(path, "needs exactly the keys role and content")
            continue
        chat.messages.add(
            role=fields.string(f"{path}.role", role), content=fields.string(f"{path}.content", content)
        )
    return chat
