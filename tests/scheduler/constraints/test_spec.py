"""What is refused before and while a constraint is parsed, by field and place."""

from __future__ import annotations

import json

import pytest

from stepahead.scheduler.constraints.engine import grammar_of
from stepahead.scheduler.constraints.errors import ConstraintInvalid, MatcherFailed
from stepahead.scheduler.constraints.json_schema import FORMATS, KEYWORDS, MAX_DEPTH, reduce_schema
from stepahead.scheduler.constraints.spec import MAX_BYTES, MAX_CHOICES, ConstraintKind, ConstraintSpec
from tests.scheduler.constraints.builders import matcher, schema_spec

ONE_TEXT = [ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR]


@pytest.mark.parametrize("kind", ONE_TEXT)
def test_sizes_are_limited_from_both_sides(kind: ConstraintKind):
    ConstraintSpec(kind, ("x" * MAX_BYTES[kind],))
    for text in ("", "x" * (MAX_BYTES[kind] + 1), "é" * (MAX_BYTES[kind] // 2 + 1), "\ud800"):
        with pytest.raises(ConstraintInvalid) as caught:
            ConstraintSpec(kind, (text,))
        assert caught.value.field == f"constraint.{kind.value}"


def test_choices_are_counted_and_not_empty():
    ConstraintSpec(ConstraintKind.CHOICES, tuple(map(str, range(MAX_CHOICES))))
    for texts, field in [
        ((), "constraint.choices.choices"),
        (tuple(map(str, range(MAX_CHOICES + 1))), "constraint.choices.choices"),
        (("a", ""), "constraint.choices.choices[1]"),
    ]:
        with pytest.raises(ConstraintInvalid) as caught:
            ConstraintSpec(ConstraintKind.CHOICES, texts)
        assert caught.value.field == field


def test_digests_tell_specs_apart():
    specs = [
        ConstraintSpec(ConstraintKind.CHOICES, ("a", "b")),
        ConstraintSpec(ConstraintKind.CHOICES, ("ab",)),
        ConstraintSpec(ConstraintKind.REGEX, ("ab",)),
        ConstraintSpec(ConstraintKind.GRAMMAR, ("ab",)),
        ConstraintSpec(ConstraintKind.JSON_OBJECT),
    ]
    assert len({spec.digest for spec in specs}) == len(specs)
    assert ConstraintSpec(ConstraintKind.REGEX, ("ab",)).digest == specs[2].digest


REFUSED = [
    "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$vocabulary", "additionalItems", "contains",
    "contentEncoding", "contentMediaType", "contentSchema", "dependencies", "dependentRequired", "dependentSchemas",
    "else", "id", "if", "maxContains", "minContains", "minimumm", "not", "nullable", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "x-guidance",
]  # fmt: skip


@pytest.mark.parametrize("keyword", REFUSED)
def test_unsupported_keywords_are_refused_by_pointer(keyword: str):
    for schema, place in [
        ({keyword: True}, ""),
        ({"type": "string", keyword: True}, ""),
        ({"properties": {"a/b~c": {"items": {keyword: {}}}}}, "/properties/a~1b~0c/items"),
        ({"$defs": {"unused": {"anyOf": [True, {keyword: {}}]}}}, "/$defs/unused/anyOf/1"),
    ]:
        with pytest.raises(ConstraintInvalid) as caught:
            reduce_schema(json.dumps(schema))
        assert caught.value.field == "constraint.json_schema"
        assert caught.value.description == f"{place}/{keyword}: keyword not supported"


WRONG_VALUES = [
    ({"type": "strin"}, "/type"), ({"type": []}, "/type"), ({"type": 1}, "/type"),
    ({"minLength": -1}, "/minLength"),
    ({"minLength": 1.5}, "/minLength"), ({"minItems": True}, "/minItems"), ({"minimum": "1"}, "/minimum"),
    ({"exclusiveMinimum": True}, "/exclusiveMinimum"), ({"multipleOf": 0}, "/multipleOf"), ({"enum": []}, "/enum"),
    ({"maximum": 2**53 + 1}, "/maximum"), ({"const": {"a": [2**53 + 1]}}, "/const"),
    ({"required": "a"}, "/required"),
    ({"format": "regex"}, "/format"), ({"format": "unknown"}, "/format"), ({"format": 1}, "/format"),
    ({"items": [{}]}, "/items"), ({"items": 3}, "/items"), ({"allOf": []}, "/allOf"), ({"anyOf": {}}, "/anyOf"),
    ({"properties": []}, "/properties"), ({"minProperties": 2}, "/minProperties"),
    ({"$ref": "http://example.com/a"}, "/$ref"), ({"$ref": "other.json#/a"}, "/$ref"), ({"$ref": "#a"}, "/$ref"),
    ({"$ref": "#/$defs/none"}, "/$ref"), ({"default": {}, "$ref": "#/default"}, "/$ref"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "/$schema"), ({"items": {"$id": "a"}}, "/items/$id"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/$defs/a", "type": "null",
      "$defs": {"a": {}}}, "/$ref"),
    ({"pattern": "(?=a)b"}, "/pattern"), ({"patternProperties": {"[[:alpha:]]": {}}},
                                          "/patternProperties/[[:alpha:]]"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "place"), WRONG_VALUES)
def test_wrong_values_are_refused_by_pointer(schema: object, place: str):
    with pytest.raises(ConstraintInvalid) as caught:
        reduce_schema(json.dumps(schema))
    assert caught.value.description.startswith(f"{place}: ")


@pytest.mark.parametrize("text", ["{", "[1]", "3", "NaN", '{"const": NaN}', '{"const": 1e999}', '{"a": 1, "a": 1}',
                                  "[" * 100_000, '{"minimum":' + "9" * 5000 + "}"])  # fmt: skip
def test_what_is_no_schema_is_refused(text: str):
    with pytest.raises(ConstraintInvalid):
        reduce_schema(text)


def test_depth_is_limited():
    def nested(depth: int) -> str:
        return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)

    reduce_schema(nested(MAX_DEPTH))
    with pytest.raises(ConstraintInvalid, match="nested deeper than 64"):
        reduce_schema(nested(MAX_DEPTH + 1))


def test_annotations_are_dropped_and_everything_else_is_kept():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "title": "t", "description": "d",
        "default": 1, "examples": [1], "$comment": "c", "deprecated": True, "readOnly": True, "writeOnly": False,
        "anyOf": [{"minLength": 2.0}, {"type": "integer", "title": "t"}], "additionalProperties": False,
        "properties": {"title": {"const": "title"}},
    }  # fmt: skip
    assert list(reduce_schema(json.dumps(schema)).items()) == [
        ("additionalProperties", False),
        ("properties", {"title": {"const": "title"}}),
        ("anyOf", [{"minLength": 2}, {"type": "integer"}]),
    ]


def test_every_format_and_keyword_in_the_tables_is_known_to_the_engine():
    for name in FORMATS:
        assert matcher(schema_spec({"type": "string", "format": name})).mask()
    examples = {
        "$defs": {"a": {}}, "$ref": "#", "additionalProperties": False, "allOf": [{}], "anyOf": [{}], "const": 1,
        "definitions": {"a": {}}, "enum": [1], "format": "date", "items": {}, "multipleOf": 2, "oneOf": [{}],
        "pattern": "a", "patternProperties": {"a": {}}, "prefixItems": [{}], "properties": {"a": {}},
        "required": ["a"], "type": "string",
    }  # fmt: skip
    for keyword in KEYWORDS - {"$ref"}:
        # Beside an assertion, because the engine ignores unknown keywords that stand alone.
        matcher(schema_spec({"minLength": 1, keyword: examples.get(keyword, 1)}))


def test_overlapping_one_of_is_refused_by_the_engine():
    with pytest.raises(MatcherFailed, match="oneOf"):
        matcher(schema_spec({"oneOf": [{"type": "number"}, {"type": "integer"}]}))


@pytest.mark.parametrize(
    "pattern",
    [
        r"a(?=b)",
        r"(?i)a",
        r"(?P<n>a)",
        "[a&&b]",
        "[a--b]",
        "[[a]]",
        "[]a]",
        "[^]",
        r"\A",
        r"\z",
        r"\1",
        r"\b",
        "{,3}",
        "[a",
        r"\ca",
        "\\",
        r"(?<!a)b",
    ],
)
def test_patterns_that_mean_something_else_are_refused(pattern: str):
    with pytest.raises(ConstraintInvalid, match="/pattern: "):
        reduce_schema(json.dumps({"pattern": pattern}))


@pytest.mark.parametrize(
    "pattern", [r"^a{1,3}$", r"^(?:a|b)+\.\/[^\]\-a-z]\d\u00e9$", r"^(?<n>x)\p{L}$", r"^[&-]\x41$"]
)
def test_other_patterns_are_taken(pattern: str):
    assert matcher(schema_spec({"type": "string", "pattern": pattern})).mask()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('start: "a" <eos>', "special tokens"), ("start: <[7]> /x/", "special tokens"),
        ("start: @other", "references"),
        ('start: %json {"type": "object"}', "%json"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "%llg"),
        ("start: x\nx[max_tokens=3]: /a+/", "max_tokens"), ("start: x\nx[temperature=0.5]: /a/", "temperature"),
        ('start: x\nx[stop="b"]: /a+/', "stop"), ('start: "\\"" <eos> "\\""', "special tokens"),
    ],
)  # fmt: skip
def test_grammars_may_not_reach_behind_the_text(text: str, word: str):
    with pytest.raises(ConstraintInvalid, match=word):
        grammar_of(ConstraintSpec(ConstraintKind.GRAMMAR, (text,)))


def test_grammars_may_hold_such_characters_in_strings_and_comments():
    text = 'start: "<@%json" /<[7]>\\/stop=/ // temperature=1 <eos>\n# %json @a\n'
    assert matcher(ConstraintSpec(ConstraintKind.GRAMMAR, (text,))).mask()
