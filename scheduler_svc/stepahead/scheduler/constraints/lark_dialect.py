"""Refuses what the engine's Lark dialect offers beyond a language over text.

Special tokens, sampling options and embedded documents would be obeyed half (a temperature that nobody applies, a
backtrack that cannot happen) or would let a grammar write tokens that end or steer a conversation.
"""

from __future__ import annotations

import re
from typing import Final

# As in the engine's lexer (parser/src/lark/lexer.rs): comments, strings and regular expressions, in which anything
# may stand. What does not end stays in the text, and is then refused by the engine itself.
_OPAQUE: Final = re.compile(r"""(?:\#|//)[^\n]* | "(?:\\.|[^"\\\x00-\x1f\x7f])*" | /(?:\\.|[^/\\])+/""", re.VERBOSE)
_DIRECTIVE: Final = re.compile(r"%[A-Za-z]+")
_DIRECTIVES: Final = frozenset({"%ignore", "%import", "%regex", "%if"})
_OPTION: Final = re.compile(r"\b(max_tokens|temperature|stop|stop_capture)\s*=")


def grammar_fault(text: str) -> str | None:
    """What is wrong with a grammar, or None. Takes time linear in its length."""
    rest = _OPAQUE.sub(" ", text)
    if "<" in rest:
        return "special tokens (<...>) are not supported"
    if "@" in rest:
        return "references to other grammars (@...) are not supported"
    for directive in _DIRECTIVE.findall(rest):
        if directive not in _DIRECTIVES:
            return f"{directive} is not supported"
    option = _OPTION.search(rest)
    if option is not None:
        return f"option {option[1]} is not supported"
    return None
