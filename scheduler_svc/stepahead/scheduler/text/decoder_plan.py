"""Translates a tokenizer's decoder pipeline into one rule per token.

A `tokenizers` decoder turns a whole list of tokens into a text, and says nothing about what may be shown
before the list is complete. Nearly all decoders of language models do the same three things, in this order:

1. rewrite each token on its own, the first one perhaps differently (Replace, Metaspace, WordPiece, Strip);
2. turn it into bytes (ByteLevel, ByteFallback, or plain UTF-8), and join the bytes of all tokens;
3. strip some leading characters of the joined text (Fuse, then Strip).

So a token's bytes depend on nothing but the token and on whether it is the first, and decoding becomes a
table look-up. What does not fit this shape (a suffix stripped from the whole text, a CTC decoder) is
refused when the tokenizer is loaded, rather than streamed wrongly later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from tokenizers import Regex, Tokenizer, decoders

from stepahead.scheduler.text.errors import BundleError

# Stands for "some token before this one" when a stage is asked how it rewrites a token that is not the first.
_ANCHOR = "a"
# ByteFallback of `tokenizers` (src/decoders/byte_fallback.rs) takes exactly these as bytes.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Inverse of GPT-2's bytes_to_unicode: printable Latin-1 as it is, the rest as U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(printable))
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(hidden)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPlan:
    """How the tokens of one tokenizer become bytes."""

    # Rewrites one token at a time; None leaves tokens as they are.
    rewrite: decoders.Decoder | None
    # Put before every token but the first: " " for a tokenizer without a decoder, else "".
    separator: str
    byte_level: bool
    byte_fallback: bool
    # Up to `num_lead_strip` leading characters of the text are dropped while they equal `lead_strip`.
    lead_strip: str
    num_lead_strip: int

    def piece(self, token: str, *, first: bool) -> bytes:
        """The bytes `token` adds to a text, as the first token of that text or as a later one."""
        if first or self.rewrite is None:
            text = self._rewrite(token)
        else:
            head = self.rewrite.decode([_ANCHOR])
            text = self.rewrite.decode([_ANCHOR, token])[len(head) :]
        if not first:
            text = self.separator + text
        return self._encode(text)

    def _rewrite(self, token: str) -> str:
        return token if self.rewrite is None else self.rewrite.decode([token])

    def _encode(self, text: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        if self.byte_level and all(char in _BYTE_LEVEL for char in text):
            return bytes(_BYTE_LEVEL[char] for char in text)
        # Also ByteLevel's own rule for tokens outside its alphabet, such as added tokens with a space.
        return text.encode("utf-8")

    def strip_lead(self, text: str, num_left: int) -> tuple[str, int]:
        """Drops leading characters of a text that arrives in parts.

        Args:
            text: The next part.
            num_left: Characters that may still be dropped; `num_lead_strip` for the first part.

        Returns:
            What is left of `text`, and `num_left` for the next part.
        """
        start = 0
        while start < num_left and text.startswith(self.lead_strip, start):
            start += 1
        kept = text[start:]
        return kept, 0 if kept else num_left - start


@dataclass(slots=True)
class _Stages:
    """The decoder pipeline as far as it has been read."""

    rewrites: list[decoders.Decoder] = field(default_factory=list[decoders.Decoder])
    byte_level: bool = False
    byte_fallback: bool = False
    fused: bool = False
    lead_strip: str = ""
    num_lead_strip: int = 0

    def add(self, stage: Mapping[str, Any]) -> None:
        """Appends one stage of tokenizer.json; raises BundleError if it does not fit the three steps."""
        kind = stage["type"]
        if kind == "Sequence":
            for inner in stage["decoders"]:
                self.add(inner)
        elif kind == "Fuse":
            self.fused = True
        elif kind == "Strip" and self.fused and not self.num_lead_strip and stage["stop"] == 0:
            self.lead_strip, self.num_lead_strip = stage["content"], stage["start"]
        elif self.fused or (self.byte_fallback and kind != "ByteLevel"):
            raise BundleError(f"tokenizer.json: decoder stage {kind} is not supported at this place")
        elif kind == "ByteLevel":
            self.byte_level = self.fused = True
        elif kind == "ByteFallback":
            self.byte_fallback = True
        else:
            self.rewrites.append(_rewriting_stage(stage))


def _rewriting_stage(stage: Mapping[str, Any]) -> decoders.Decoder:
    match stage:
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(content)}:
            return decoders.Replace(text, content)
        case {"type": "Replace", "pattern": {"Regex": str(regex)}, "content": str(content)}:
            return decoders.Replace(Regex(regex), content)
        case {"type": "Metaspace", "replacement": str(char), "prepend_scheme": str(scheme)}:
            return decoders.Metaspace(replacement=char, prepend_scheme=scheme)
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
            return decoders.WordPiece(prefix=prefix, cleanup=cleanup)
        # The library's own Strip panics on tokens shorter than `stop`, so only leading strips are safe.
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return decoders.Strip(content=char, left=start, right=0)
        case _:
            raise BundleError(f"tokenizer.json: decoder stage {stage['type']} is not supported")


def plan_decoder(tokenizer: Tokenizer) -> DecoderPlan:
    """Reads the decoder of `tokenizer`.

    Raises:
        BundleError: The decoder does not fit the shape described at the top of this module.
    """
    stages = _Stages()
    decoder = cast("decoders.Decoder | None", tokenizer.decoder)
    if decoder is not None:
        # The state of a decoder is its part of tokenizer.json.
        stages.add(json.loads(decoder.__getstate__()))
    return DecoderPlan(
        rewrite=decoders.Sequence(stages.rewrites) if stages.rewrites else None,
        separator=" " if decoder is None else "",
        byte_level=stages.byte_level,
        byte_fallback=stages.byte_fallback,
        lead_strip=stages.lead_strip,
        num_lead_strip=stages.num_lead_strip,
    )
