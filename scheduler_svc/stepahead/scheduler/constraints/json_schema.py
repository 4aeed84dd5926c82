"""Checks a JSON Schema against what the engine enforces, and reduces it to exactly that.

The engine ignores keywords it does not know in some places and reports others without saying where. So nothing
reaches it that is not in the table below: an unknown or unsupported keyword is an error that names it by JSON
pointer, annotations are dropped, and every value has its type checked.

The meaning is that of draft 2020-12. Older drafts are accepted where they mean the same (_DIALECTS).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Final, NoReturn, TypeGuard, cast
from urllib.parse import unquote

from stepahead.scheduler.constraints.errors import ConstraintInvalid
from stepahead.scheduler.constraints.regex_dialect import pattern_fault

MAX_DEPTH: Final = 64
"""Arrays and objects inside each other, in the schema's text."""

FIELD: Final = "constraint.json_schema"
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
)
# Does an assertion beside `$ref` count? Up to draft-07 it did not, and is refused there.
_DIALECTS: Final = {
    "https://json-schema.org/draft/2020-12/schema": True,
    "https://json-schema.org/draft/2019-09/schema": True,
    "http://json-schema.org/draft-07/schema": False,
    "http://json-schema.org/draft-06/schema": False,
}
# Every integer up to this has a double of its own; the engine computes with doubles.
_MAX_EXACT_INTEGER: Final = 2**53
# Keywords that combine schemas come last: the engine merges in the order of the text, and a schema's own
# `additionalProperties` must meet its own `properties` first.
_COMBINING: Final = frozenset({"const", "enum", "$ref", "allOf", "anyOf", "oneOf"})


def reduce_schema(text: str) -> dict[str, object] | bool:
    """Parses a schema and returns what the engine shall enforce.

    Raises:
        ConstraintInvalid: No JSON, too deep, an unsupported keyword, or a keyword with a wrong value.
    """
    document = _parse(text)
    reducer = _Reducer()
    reduced = reducer.schema(document, "")
    reducer.check_references()
    return reduced


def _parse(text: str) -> object:
    try:
        document: object = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError:
        _refuse("", f"nested deeper than {MAX_DEPTH} levels")
    except ValueError as error:
        _refuse("", f"not JSON: {error}")
    _check_depth(document)
    return document


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("an object has the same key twice")
    return document


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def _check_depth(document: object) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level if _is_object(value) or _is_list(value) for inner in _children(value)]
        if not any(_is_object(value) or _is_list(value) for value in level):
            return
    _refuse("", f"nested deeper than {MAX_DEPTH} levels")


def _children(value: dict[str, object] | list[object]) -> Iterable[object]:
    return value.values() if _is_object(value) else value


class _Reducer:
    """One pass over a schema; remembers where schemas stand, and what is referred to."""

    __slots__ = ("_places", "_references", "_siblings_count")

    def __init__(self) -> None:
        self._places: set[str] = set()
        self._references: list[tuple[str, str]] = []
        self._siblings_count = True

    def schema(self, value: object, pointer: str) -> dict[str, object] | bool:
        self._places.add(pointer)
        if isinstance(value, bool):
            return value
        if not _is_object(value):
            _refuse(pointer, "not a schema (an object, true or false)")
        reduced: dict[str, object] = {}
        combining: dict[str, object] = {}
        for keyword, argument in value.items():
            place = f"{pointer}/{_escaped(keyword)}"
            if keyword in ANNOTATIONS:
                continue
            if keyword in {"$schema", "$id"}:
                self._identity(keyword, argument, place, at_root=not pointer)
                continue
            rule = _RULES.get(keyword)
            if rule is None:
                _refuse(place, "keyword not supported")
            (combining if keyword in _COMBINING else reduced)[keyword] = rule(self, argument, place)
        self._check_siblings(value, pointer)
        _check_property_count(reduced, pointer)
        return {**reduced, **combining}

    def check_references(self) -> None:
        """Every reference must lead to a place where a schema stands."""
        for target, place in self._references:
            if target not in self._places:
                _refuse(place, "leads to no schema of this document")

    def _identity(self, keyword: str, argument: object, place: str, *, at_root: bool) -> None:
        if not at_root:
            _refuse(place, "supported at the root only")
        if not isinstance(argument, str):
            _refuse(place, "not a string")
        if keyword == "$schema":
            siblings_count = _DIALECTS.get(argument.removesuffix("#"))
            if siblings_count is None:
                _refuse(place, f"draft not supported; known are {', '.join(_DIALECTS)}")
            self._siblings_count = siblings_count

    def _check_siblings(self, value: dict[str, object], pointer: str) -> None:
        others = value.keys() - ANNOTATIONS - {"$ref", "$schema", "$id", "$defs", "definitions"}
        if "$ref" in value and others and not self._siblings_count:
            _refuse(f"{pointer}/$ref", f"this draft ignores {min(others)} beside it; leave out one of the two")

    def schema_list(self, value: object, place: str) -> list[object]:
        if not _is_list(value) or not value:
            _refuse(place, "not a list of at least one schema")
        return [self.schema(item, f"{place}/{index}") for index, item in enumerate(value)]

    def schema_map(self, value: object, place: str) -> dict[str, object]:
        if not _is_object(value):
            _refuse(place, "not an object of schemas")
        return {name: self.schema(item, f"{place}/{_escaped(name)}") for name, item in value.items()}

    def pattern_map(self, value: object, place: str) -> dict[str, object]:
        reduced = self.schema_map(value, place)
        for pattern in reduced:
            _pattern(self, pattern, f"{place}/{_escaped(pattern)}")
        return reduced

    def items(self, value: object, place: str) -> object:
        if _is_list(value):
            _refuse(place, "a list is not supported; use prefixItems")
        return self.schema(value, place)

    def reference(self, value: object, place: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            _refuse(place, "only references inside this document are supported ('#' or '#/...')")
        self._references.append((unquote(value[1:]), place))
        return value


def _type(_: _Reducer, value: object, place: str) -> object:
    names = value if _is_list(value) else [value]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            _refuse(place, f"{name!r} is no type")
    if not names:
        _refuse(place, "an empty list")
    return value


def _count(_: _Reducer, value: object, place: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not _is_integer(value) or not 0 <= value <= _MAX_EXACT_INTEGER:
        _refuse(place, "not a whole number of 0 or more")
    return value


def _number(_: _Reducer, value: object, place: str) -> float:
    if not isinstance(value, float) and not _is_integer(value):
        _refuse(place, "not a number")
    _check_exact(value, place)
    return value


def _positive(reducer: _Reducer, value: object, place: str) -> float:
    number = _number(reducer, value, place)
    if number <= 0:
        _refuse(place, "not above 0")
    return number


def _names(_: _Reducer, value: object, place: str) -> object:
    if not _is_list(value) or not all(isinstance(name, str) for name in value):
        _refuse(place, "not a list of strings")
    return value


def _pattern(_: _Reducer, value: object, place: str) -> str:
    if not isinstance(value, str):
        _refuse(place, "not a string")
    fault = pattern_fault(value)
    if fault is not None:
        _refuse(place, fault)
    return value


def _format(_: _Reducer, value: object, place: str) -> str:
    if not isinstance(value, str) or value not in FORMATS:
        _refuse(place, f"{value!r} is not supported; known are {', '.join(sorted(FORMATS))}")
    return value


def _constant(_: _Reducer, value: object, place: str) -> object:
    stack = [value]
    while stack:
        inner = stack.pop()
        if _is_object(inner):
            stack.extend(inner.values())
        elif _is_list(inner):
            stack.extend(inner)
        else:
            _check_exact(inner, place)
    return value


def _constants(reducer: _Reducer, value: object, place: str) -> object:
    if not _is_list(value) or not value:
        _refuse(place, "not a list of at least one value")
    return _constant(reducer, value, place)


def _check_exact(value: object, place: str) -> None:
    if _is_integer(value) and abs(value) > _MAX_EXACT_INTEGER:
        _refuse(place, "integers beyond 2**53 are not supported")


def _check_property_count(reduced: dict[str, object], pointer: str) -> None:
    # A grammar cannot count distinct keys: with two free keys wanted, it would take the same one twice.
    required = cast("list[str]", reduced.get("required", []))
    limit = len(set(required)) + 1
    if cast("int", reduced.get("minProperties", 0)) > limit:
        _refuse(f"{pointer}/minProperties", f"at most one more than `required` names ({limit}) is supported")


_Rule = Callable[[_Reducer, object, str], object]
_RULES: Final[dict[str, _Rule]] = {
    "$defs": _Reducer.schema_map,
    "$ref": _Reducer.reference,
    "additionalProperties": _Reducer.schema,
    "allOf": _Reducer.schema_list,
    "anyOf": _Reducer.schema_list,
    "const": _constant,
    "definitions": _Reducer.schema_map,
    "enum": _constants,
    "exclusiveMaximum": _number,
    "exclusiveMinimum": _number,
    "format": _format,
    "items": _Reducer.items,
    "maxItems": _count,
    "maxLength": _count,
    "maxProperties": _count,
    "maximum": _number,
    "minItems": _count,
    "minLength": _count,
    "minProperties": _count,
    "minimum": _number,
    "multipleOf": _positive,
    "oneOf": _Reducer.schema_list,
    "pattern": _pattern,
    "patternProperties": _Reducer.pattern_map,
    "prefixItems": _Reducer.schema_list,
    "properties": _Reducer.schema_map,
    "required": _names,
    "type": _type,
}
KEYWORDS: Final = frozenset(_RULES)
"""What is enforced."""


def _refuse(pointer: str, text: str) -> NoReturn:
    raise ConstraintInvalid(FIELD, f"{pointer or 'the document'}: {text}")


def _escaped(key: str) -> str:
    """A key as part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
