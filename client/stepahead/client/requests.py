"""Builds protocol requests from Python values.

Only what does not fit the protocol's types is refused here (a negative count, a seed of 65 bits): whether a
value makes sense is the server's to say, so that client and server cannot disagree. Both name the field by
its path in GenerateRequest.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import SupportsFloat, SupportsIndex, TypeAlias, TypedDict, Unpack, cast

from stepahead.client.errors import FieldViolation, invalid
from stepahead.client.values import ChatMessage
from stepahead.v1 import generation_pb2

ChatTurn: TypeAlias = ChatMessage | Mapping[str, str]
# Text, token ids, or a conversation whose turns are ChatMessage or {"role": ..., "content": ...}.
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatTurn]

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; GenerationRequest says what each means."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    include_stop_in_output: bool | None
    num_choices: int | None
    request_id: str
    model: str
    text: bool | None
    token_ids: bool | None
    skip_special_tokens: bool | None
    final_only: bool
    queue_timeout: float | None
    timeout: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request. None leaves a choice to the model's or the server's default; zero means zero.

    `temperature` 0 is greedy; `top_p`, `top_k`, `min_p` narrow the draw; `seed` makes it repeatable.
    `max_tokens`, `min_tokens`, `stop`, `stop_token_ids` and `ignore_eos` say when to end. `text` and
    `token_ids` say what to deliver, `final_only` asks for it in one piece at the end. `queue_timeout` and
    `timeout` are seconds: waiting for admission, and the whole request (the call's deadline).
    """

    prompt: Prompt
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_in_output: bool | None = None
    num_choices: int | None = None
    request_id: str = ""
    model: str = ""
    text: bool | None = None
    token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    final_only: bool = False
    queue_timeout: float | None = None
    timeout: float | None = None


def make_request(prompt: Prompt | GenerationRequest, **options: Unpack[GenerateOptions]) -> GenerationRequest:
    """A request from a prompt and options; options given beside a ready request replace its own."""
    if isinstance(prompt, GenerationRequest):
        return replace(prompt, **options)
    return GenerationRequest(prompt=prompt, **options)


def generate_message(request: GenerationRequest, *, timeout_in_message: bool) -> generation_pb2.GenerateRequest:
    """The protocol's form of a request.

    `timeout_in_message` puts the timeout into the message: Multiplex needs it there, while Generate carries
    it as the call's deadline. Raises InvalidRequestError, before anything is sent, naming every value that
    does not fit.
    """
    fields = _Fields()
    message = generation_pb2.GenerateRequest(
        request_id=fields.string("request_id", request.request_id),
        model=fields.string("model", request.model),
        sampling=generation_pb2.SamplingParams(
            temperature=fields.float32("sampling.temperature", request.temperature),
            top_p=fields.float32("sampling.top_p", request.top_p),
            top_k=fields.integer("sampling.top_k", request.top_k, _INT32_MIN, _INT32_MAX),
            min_p=fields.float32("sampling.min_p", request.min_p),
            seed=fields.integer("sampling.seed", request.seed, 0, _UINT64_MAX),
        ),
        stopping=_stopping_message(fields, request),
        num_choices=fields.integer("num_choices", request.num_choices, 0, _UINT32_MAX),
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
        scheduling=generation_pb2.SchedulingParams(
            queue_timeout_ms=fields.milliseconds("scheduling.queue_timeout_ms", request.queue_timeout),
            timeout_ms=fields.milliseconds(
                "scheduling.timeout_ms", request.timeout if timeout_in_message else None
            ),
        ),
    )
    _set_prompt(fields, message, request.prompt)
    fields.refuse_violations()
    return message


def chat_prompt(messages: Sequence[ChatTurn]) -> Sequence[ChatTurn]:
    """Checks that a prompt is a conversation. Raises InvalidRequestError."""
    if not _is_chat(messages):
        raise invalid([FieldViolation("chat.messages", "needs at least one message with role and content")])
    return messages


def tokenize_message(prompt: str | Sequence[ChatTurn], model: str = "") -> generation_pb2.TokenizeRequest:
    """The protocol's form of something to tokenize. Raises InvalidRequestError."""
    fields = _Fields()
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
    fields = _Fields()
    message = generation_pb2.DetokenizeRequest(
        model=fields.string("model", model),
        token_ids=fields.uint32s("token_ids", token_ids),
        skip_special_tokens=skip_special_tokens,
    )
    fields.refuse_violations()
    return message


def cancel_message(request_ids: Sequence[str]) -> generation_pb2.CancelRequest:
    """The protocol's form of a cancellation. Raises InvalidRequestError."""
    fields = _Fields()
    if isinstance(request_ids, str):
        request_ids = (request_ids,)
    message = generation_pb2.CancelRequest(request_ids=fields.strings("request_ids", request_ids))
    fields.refuse_violations()
    return message


def check_timeout(timeout: float | None) -> float | None:
    """A deadline in seconds, above 0. Raises InvalidRequestError for anything else."""
    fields = _Fields()
    fields.milliseconds("timeout", timeout)
    fields.refuse_violations()
    return timeout


def _stopping_message(fields: "_Fields", request: GenerationRequest) -> generation_pb2.StoppingParams:
    stop = (request.stop,) if isinstance(request.stop, str) else request.stop
    return generation_pb2.StoppingParams(
        max_tokens=fields.integer("stopping.max_tokens", request.max_tokens, 0, _UINT32_MAX),
        min_tokens=fields.integer("stopping.min_tokens", request.min_tokens, 0, _UINT32_MAX),
        stop_strings=fields.strings("stopping.stop_strings", stop),
        stop_token_ids=fields.uint32s("stopping.stop_token_ids", request.stop_token_ids),
        ignore_eos=fields.flag("stopping.ignore_eos", request.ignore_eos),
        include_stop_in_output=fields.flag("stopping.include_stop_in_output", request.include_stop_in_output),
    )


def _set_prompt(fields: "_Fields", message: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = fields.string("text", prompt)
    elif _is_chat(prompt):
        message.chat.CopyFrom(_chat_input(fields, cast(Sequence[ChatTurn], prompt)))
    else:
        # An empty sequence becomes an empty list of ids: the server refuses it by name.
        ids = fields.uint32s("token_ids.ids", cast(Sequence[int], prompt))
        message.token_ids.CopyFrom(generation_pb2.TokenIdsInput(ids=ids))


def _is_chat(prompt: object) -> bool:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    turns = cast(Sequence[object], prompt)
    return len(turns) > 0 and isinstance(turns[0], ChatMessage | Mapping)


def _chat_input(fields: "_Fields", turns: Sequence[ChatTurn]) -> generation_pb2.ChatInput:
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


class _Fields:
    """Checks values against the protocol's types and remembers every violation.

    A checked value comes back as the protocol's type. A value that does not fit comes back as a stand-in, and
    `refuse_violations` raises before the message is used.
    """

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def refuse(self, path: str, description: str) -> None:
        self._violations.append(FieldViolation(path, description))

    def refuse_violations(self) -> None:
        if self._violations:
            raise invalid(self._violations)

    def integer(self, path: str, value: SupportsIndex | None, low: int, high: int) -> int | None:
        if value is None:
            return None
        # operator.index takes NumPy integers and refuses floats; a bool is an int to Python, but no count.
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            self.refuse(path, f"must be an integer, not {type(value).__name__}")
            return None
        number = operator.index(value)
        if not low <= number <= high:
            self.refuse(path, f"{number} is outside {low} .. {high}")
            return None
        return number

    def uint32s(self, path: str, values: Sequence[SupportsIndex]) -> list[int]:
        if not self._is_list(path, values):
            return []
        checked = (self.integer(f"{path}[{index}]", value, 0, _UINT32_MAX) for index, value in enumerate(values))
        return [number for number in checked if number is not None]

    def float32(self, path: str, value: SupportsFloat | None) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool | str) or not hasattr(value, "__float__"):
            self.refuse(path, f"must be a number, not {type(value).__name__}")
            return None
        number = float(value)
        # NaN and infinities are values of the type; refusing them is the server's part.
        if math.isfinite(number) and abs(number) > _FLOAT32_MAX:
            self.refuse(path, f"{number} does not fit a 32-bit float")
            return None
        return number

    def milliseconds(self, path: str, seconds: float | None) -> int | None:
        number = self.float32(path, seconds)
        if number is None:
            return None
        # Written so that NaN is refused too.
        if not 0 < number <= _UINT32_MAX / 1000:
            self.refuse(path, f"{number} s is not above 0 and at most {_UINT32_MAX // 1000}")
            return None
        return math.ceil(number * 1000)

    def string(self, path: str, value: object) -> str:
        if not isinstance(value, str):
            self.refuse(path, f"must be a string, not {type(value).__name__}")
            return ""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self.refuse(path, f"is no valid Unicode text at character {error.start}")
            return ""
        return value

    def flag(self, path: str, value: object) -> bool | None:
        if value is not None and not isinstance(value, bool):
            self.refuse(path, f"must be true or false, not {type(value).__name__}")
            return None
        return value

    def strings(self, path: str, values: Sequence[str]) -> list[str]:
        if not self._is_list(path, values):
            return []
        return [self.string(f"{path}[{index}]", value) for index, value in enumerate(values)]

    def _is_list(self, path: str, values: object) -> bool:
        # NumPy arrays are no Sequence, but behave like one here.
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            self.refuse(path, f"must be a list, not {type(cast(object, values)).__name__}")
            return False
        return True
