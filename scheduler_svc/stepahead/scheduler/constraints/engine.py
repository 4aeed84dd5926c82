"""The constraint engine, llguidance: from a specification to its grammar, from a grammar to a matcher.

The grammar text is what crosses the process border: the sandbox makes it, and both sides build the same matcher
from it under the same limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from stepahead.scheduler.constraints.errors import ConstraintInvalid, MatcherFailed
from stepahead.scheduler.constraints.json_schema import reduce_schema
from stepahead.scheduler.constraints.lark_dialect import grammar_fault
from stepahead.scheduler.constraints.matcher import Matcher
from stepahead.scheduler.constraints.spec import ConstraintKind, ConstraintSpec
from stepahead.scheduler.constraints.token_table import TokenTable

# By default the engine forces its own tokenization of every text that has no alternative, for which it would call
# into Python, under the interpreter lock, in the middle of a mask. Without, a mask allows every token that fits.
_OPTIONS: Final = '%llguidance {"no_forcing": true}'
_MAX_ERROR_CHARS: Final = 400

# White space has no end of its own: a model that likes blanks would write them until its last token. This much
# still allows a line break and the indentation of any document a person wrote.
MAX_JSON_WHITE_SPACE: Final = 64
_JSON_OPTIONS: Final = {"whitespace_pattern": f"[ \\t\\n\\r]{{0,{MAX_JSON_WHITE_SPACE}}}"}


def grammar_of(spec: ConstraintSpec) -> str:
    """The engine's grammar for a constraint. Pure Python but for escaping; not for the event loop.

    Raises:
        ConstraintInvalid: The constraint asks for something that is not enforced exactly.
    """
    match spec.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_grammar(reduce_schema(spec.texts[0]))
        case ConstraintKind.JSON_OBJECT:
            return _json_grammar({"type": "object"})
        case ConstraintKind.REGEX:
            return _lark_grammar(f"start: /{regex_to_lark(spec.texts[0], '')}/")
        case ConstraintKind.GRAMMAR:
            fault = grammar_fault(spec.texts[0])
            if fault is not None:
                raise ConstraintInvalid(spec.field, fault)
            return _lark_grammar(spec.texts[0])
        case ConstraintKind.CHOICES:
            # dict: the engine takes equal alternatives for an ambiguity, which costs time.
            return _lark_grammar("start: " + " | ".join(map(_lark_string, dict.fromkeys(spec.texts))))


def _json_grammar(schema: dict[str, object] | Literal[True, False]) -> str:
    # True is the schema {}, and has no place for options.
    document = schema if schema is False else {**({} if schema is True else schema), "x-guidance": _JSON_OPTIONS}
    grammars = [{"lark_grammar": f"{_OPTIONS}\nstart: @document"}, {"name": "document", "json_schema": document}]
    return json.dumps({"grammars": grammars})


def _lark_grammar(text: str) -> str:
    # Behind the text, so that the engine's messages count the client's lines.
    return json.dumps({"grammars": [{"lark_grammar": f"{text}\n{_OPTIONS}\n"}]})


def _lark_string(text: str) -> str:
    # A string of Lark is one of JSON, less the raw DEL.
    return json.dumps(text).replace("\x7f", "\\u007f")


class Engine:
    """Builds matchers for one tokenizer. Safe to share between threads."""

    __slots__ = ("_limits", "_table", "_tokenizer")

    def __init__(self, table: TokenTable) -> None:
        """Builds the engine's token trie: 0.1 s for 50,000 tokens, during which the interpreter lock is held."""
        self._table = table
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Pieces(table)), eos_token=list(table.eos_ids))
        self._limits = LLParserLimits(
            # Four per property of an object. With the default, 2,000, a wide schema failed behind the first key.
            max_items_in_row=20_000,
            # 1 to 2 KB each, in the process that serves.
            max_lexer_states=50_000,
            # A message must not hold the grammar, and thereby other parts of a request.
            verbose_errors=False,
        )

    def build(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a text. Releases the interpreter lock while it works.

        Raises:
            MatcherFailed: The engine refuses the grammar; the message says why.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise MatcherFailed(_first_words(matcher.get_error()))
        return Matcher(matcher, self._table)


def _first_words(text: str) -> str:
    # Panics and parser errors carry a stack or a state dump behind the message.
    for marker in ("<backtrace>", "<state>"):
        text = text.split(marker, maxsplit=1)[0]
    # Around the reason stand the expression with an arrow under it, and the grammar we have put it into.
    if reason := re.search(r"regex parse error:.*?^error: ([^\n]+)", text, re.DOTALL | re.MULTILINE):
        text = f"not a regular expression we can follow: {reason[1]}"
    text = text.strip()
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."


class _Pieces:
    """What `TokenizerWrapper` wants of a tokenizer."""

    def __init__(self, table: TokenTable) -> None:
        self.tokens: Sequence[bytes] = table.pieces
        self.eos_token_id = table.eos_ids[0]
        self.bos_token_id: int | None = None
        self.special_token_ids: Sequence[int] = ()
        self._id_of_byte = {piece[0]: index for index, piece in enumerate(table.pieces) if len(piece) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Byte by byte: only what the wrapper tries when it is made, and what no grammar of ours asks for."""
        encoded = text.encode() if isinstance(text, str) else text
        return [self._id_of_byte.get(value, self.eos_token_id) for value in encoded]
