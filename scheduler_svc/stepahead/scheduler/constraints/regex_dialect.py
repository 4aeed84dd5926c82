"""Finds the places where the engine's regular expressions (Rust) mean something else than JSON Schema's (ECMA-262).

A pattern that is valid in both and means the same passes; everything else is refused, so that a client never gets
another language than the one it wrote. Two differences are small enough to live with and are documented
(docs/structured-output.md): `.` excludes only the newline, and whitespace is Unicode's White_Space.
"""

from __future__ import annotations

import re
from typing import Final

_REPEAT: Final = re.compile(r"\{\d+(?:,\d*)?\}")
_NAMED_GROUP: Final = re.compile(r"\(\?<[A-Za-z_]\w*>")
# Letters and digits behind a backslash that mean the same in both; others are unknown to one of them.
_ESCAPE: Final = re.compile(
    r"\\(?:[dDwWsStnrfv]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{\w+(?:=\w+)?\}|[^A-Za-z0-9\s])"
)
_CLASS_OPERATORS: Final = ("&&", "--", "~~")


def pattern_fault(pattern: str) -> str | None:
    """What is wrong with a `pattern`, or None. Takes time linear in its length."""
    place = 0
    while place < len(pattern):
        if pattern[place] == "[":
            end, fault = _class_end(pattern, place)
        else:
            end, fault = _atom_end(pattern, place)
        if fault is not None:
            return fault
        place = end
    return None


def _atom_end(pattern: str, place: int) -> tuple[int, str | None]:
    char = pattern[place]
    if char == "\\":
        return _escape_end(pattern, place)
    if char == "{":
        repeat = _REPEAT.match(pattern, place)
        return (place, "'{' that begins no repetition") if repeat is None else (repeat.end(), None)
    if pattern.startswith("(?", place):
        if pattern.startswith("(?:", place):
            return place + 3, None
        group = _NAMED_GROUP.match(pattern, place)
        if group is not None:
            return group.end(), None
        return place, f"group {pattern[place : place + 4]!r}: lookaround and flags are not supported"
    return place + 1, None


def _escape_end(pattern: str, place: int) -> tuple[int, str | None]:
    escape = _ESCAPE.match(pattern, place)
    if escape is None:
        return place, f"escape {pattern[place : place + 2]!r} is not supported"
    return escape.end(), None


def _class_end(pattern: str, place: int) -> tuple[int, str | None]:
    place += 2 if pattern.startswith("[^", place) else 1
    if pattern.startswith("]", place):
        return place, "an empty character class"
    while place < len(pattern):
        char = pattern[place]
        if char == "]":
            return place + 1, None
        if char == "[":
            return place, "'[' inside a character class must be escaped"
        if pattern[place : place + 2] in _CLASS_OPERATORS:
            return place, f"{pattern[place : place + 2]!r} inside a character class"
        if char == "\\":
            place, fault = _escape_end(pattern, place)
            if fault is not None:
                return place, fault
        else:
            place += 1
    return place, "a character class without end"
