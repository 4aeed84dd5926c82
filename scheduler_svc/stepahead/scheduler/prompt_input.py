"""The prompt of a request as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stepahead.scheduler.errors import FieldViolation, InvalidRequest
from stepahead.scheduler.field_checks import Violations, check_ids
from stepahead.scheduler.served_model import MAX_PROMPT_BYTES, ServedModel
from stepahead.scheduler.text.chat_template import ChatTurn
from stepahead.scheduler.text.errors import TextError
from stepahead.v1 import generation_pb2

MAX_CHAT_MESSAGES = 4096
"""Millions of empty messages fit a request, and looking at each would hold the loop that plans steps."""
THREADED_ABOVE_BYTES = 8 * 1024
"""Longer prompts are tokenized in a thread: the loop also plans steps."""


async def prompt_token_ids(
    request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, model: ServedModel
) -> list[int]:
    """The prompt as token ids.

    Raises:
        InvalidRequest: no input, too large, not encodable, ids out of range, or empty.
    """
    kind = request.WhichOneof("input")
    violations = Violations()
    if kind is None:
        names = "text, chat or token_ids" if isinstance(request, generation_pb2.GenerateRequest) else "text or chat"
        violations.add("input", f"one of {names} is required")
    elif kind == "token_ids" and isinstance(request, generation_pb2.GenerateRequest):
        ids = list(request.token_ids.ids)
        violations.check(bool(ids), "token_ids.ids", "is empty; a prompt needs at least one token")
        check_ids(ids, "token_ids.ids", model, violations)
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
    violations = Violations()
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
        raise InvalidRequest([FieldViolation(field, str(error).removeprefix(f"{field}: "))]) from error
