"""Matchers over small tokenizers, and walks through them."""

from __future__ import annotations

import json
import random

from stepahead.scheduler.constraints.engine import Engine, grammar_of
from stepahead.scheduler.constraints.matcher import Matcher
from stepahead.scheduler.constraints.spec import ConstraintKind, ConstraintSpec
from stepahead.scheduler.constraints.token_table import TokenTable, token_table
from stepahead.scheduler.text.codec import CodecSettings, TextCodec
from tests.scheduler.text.builders import EOS, byte_fallback, byte_level

_TOKENIZER = byte_level()
_EOS_IDS = tuple(_TOKENIZER.token_to_id(name) for name in (EOS, "<bos>"))
CODEC = TextCodec(_TOKENIZER, settings=CodecSettings(eos_token_ids=_EOS_IDS))
# Wider than the vocabulary and no multiple of 8, as logits may be.
VOCAB_SIZE = CODEC.vocab_size + 13
TABLE = token_table(CODEC, VOCAB_SIZE)
ENGINE = Engine(TABLE)


def fallback_codec() -> TextCodec:
    """SentencePiece with byte tokens: "b" exists as a token and as a byte."""
    tokenizer = byte_fallback(strip=True)
    return TextCodec(tokenizer, settings=CodecSettings(eos_token_ids=(tokenizer.token_to_id(EOS),)))


def schema_spec(schema: object) -> ConstraintSpec:
    """A JSON Schema as a client sends it."""
    return ConstraintSpec(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),))


def matcher(spec: ConstraintSpec, engine: Engine = ENGINE) -> Matcher:
    """A matcher without sandbox."""
    return engine.build(grammar_of(spec))


def allowed_ids(mask: bytes) -> list[int]:
    """Ids whose bit is set."""
    return [index for index in range(len(mask) * 8) if mask[index >> 3] >> (index & 7) & 1]


def takes(spec: ConstraintSpec, text: str) -> bool:
    """Whether a text is in the language: every byte's token is in its mask and accepted, and the end allowed."""
    position = matcher(spec)
    single = {piece: index for index, piece in enumerate(TABLE.pieces) if len(piece) == 1}
    for value in text.encode():
        token_id = single[bytes([value])]
        if position.is_finished or token_id not in allowed_ids(position.mask()):
            assert not position.fork().accept(token_id)
            return False
        assert position.accept(token_id)
    return position.allows_end


def walk(position: Matcher, seed: int, *, table: TokenTable = TABLE, num_steps: int = 3000) -> list[int]:
    """Random tokens until the end: uniform among the allowed ones at first, then towards the shortest end."""
    rng = random.Random(seed)
    closing = {b'"', b"]", b"}", b"e", b"l"}
    tokens: list[int] = []
    for step in range(num_steps):
        ids = allowed_ids(position.mask())
        ends = [index for index in ids if index in table.eos_ids]
        hurried = [index for index in ids if table.pieces[index] in closing]
        if ends and (step > 20 or rng.random() < 0.3):
            ids = ends
        elif step > 40 and not hurried:
            hurried = [index for index in ids if table.pieces[index] in {b",", b":"}]
            ids = hurried or ids
        elif hurried and (step > 40 or rng.random() < 0.5):
            ids = hurried
        token_id = rng.choice(ids)
        assert position.accept(token_id)
        if position.has_ended:
            return tokens
        tokens.append(token_id)
    raise AssertionError(f"no end after {num_steps} tokens: {b''.join(table.pieces[t] for t in tokens)[-200:]!r}")


def text_of(tokens: list[int], table: TokenTable = TABLE) -> str:
    """The delivered text."""
    return b"".join(table.pieces[index] for index in tokens).decode()
