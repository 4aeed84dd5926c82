"""What a schema lets through is valid, for made-up schemas of every feature (rule I2)."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from stepahead.scheduler.constraints.engine import MAX_JSON_WHITE_SPACE
from tests.scheduler.constraints.builders import matcher, schema_spec, takes, text_of, walk

_WORDS = ["a", "bc", "x y", "é", 'q"', "b/c~d", ""]


def made_schema(rng: random.Random, depth: int) -> object:
    """A random satisfiable schema."""
    kinds = ["string", "number", "enum", "const", "boolean", "null", "pattern"]
    if depth:
        kinds += ["object", "array", "tuple", "anyOf", "allOf", "map", "patternMap", "oneOf"] * 2
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)}
        case "number":
            low = rng.randint(-20, 5)
            name = rng.choice(["minimum", "exclusiveMinimum"])
            bounds = {name: low, "maximum": low + rng.randint(4, 900)}
            return {"type": rng.choice(["integer", "number"]), **bounds} | rng.choice([{}, {"multipleOf": 2}])
        case "enum":
            return {"enum": [rng.choice(_WORDS), 3, None, True, {"a": [1.5]}]}
        case "const":
            return {"const": rng.choice([*_WORDS, 7, -0.25, {"k": "v"}, [[]]])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice([r"^[ab]{1,3}$", r"^\d+-x$", r"^(?:no|yes)$"])}
        case "object":
            names = rng.sample(_WORDS, rng.randint(1, 4))
            properties = {name: made_schema(rng, depth - 1) for name in names}
            required = rng.sample(names, rng.randint(0, len(names)))
            extra = rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "null"}}])
            return {"type": "object", "properties": properties, "required": required, **extra}
        case "map":
            return {"type": "object", "additionalProperties": made_schema(rng, depth - 1), "minProperties": 1}
        case "patternMap":
            inner = made_schema(rng, depth - 1)
            return {"type": "object", "patternProperties": {"^[xy]+$": inner}, "additionalProperties": False}
        case "array":
            few = rng.randint(0, 2)
            return {"type": "array", "items": made_schema(rng, depth - 1), "minItems": few, "maxItems": few + 2}
        case "tuple":
            return {"type": "array", "prefixItems": [made_schema(rng, depth - 1)], "items": False, "minItems": 1}
        case "anyOf":
            return {"anyOf": [made_schema(rng, depth - 1) for _ in range(2)]}
        case "oneOf":
            return {"oneOf": [{"type": "null"}, {"type": "array"}]}
        case "allOf":
            inner = made_schema(rng, depth - 1)
            return {
                "allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": made_schema(rng, depth - 1)}}]
            }
        case simple:
            return {"type": simple}


@pytest.mark.parametrize("block", range(10))
def test_i2_random_walks_parse_and_validate(block: int):
    for seed in range(block * 20, block * 20 + 20):
        schema = made_schema(random.Random(seed), 2)
        text = text_of(walk(matcher(schema_spec(schema)), seed))
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


VERDICTS = [
    ({"type": "integer"}, ["0", "-12"], ["1.5", '"1"', "01", "null"]),
    ({"type": ["null", "boolean"]}, ["null", "true"], ["0", '""']),
    ({"minLength": 2, "maxLength": 3, "type": "string"}, ['"é😀"', '"abc"'], ['"a"', '"abcd"']),
    ({"pattern": "b", "type": "string"}, ['"abc"'], ['"ac"']),
    ({"multipleOf": 0.1, "type": "number"}, ["0.5", "1"], ["0.35"]),
    ({"exclusiveMinimum": 3, "maximum": 5, "type": "number"}, ["3.1", "5"], ["3", "5.1"]),
    ({"properties": {"a": {"type": "null"}}}, ["1", "{}", '{"a":null}', '{"b":1}'], ['{"a":1}']),
    ({"properties": {"a": {}}, "patternProperties": {"^x": {"type": "null"}}, "allOf": [{"required": ["a"]}],
      "additionalProperties": False, "type": "object"},
     ['{"a":1,"x":null}'], ['{"a":1,"x":1}', '{"a":1,"b":1}', "{}"]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, ["[]", "[1,2,2]"], ["[2]", "[1,1]"]),
    ({"enum": ["a", 1, [None]]}, ['"a"', "1", "[null]"], ['"b"', "[1]"]),
    ({"$defs": {"a/b%": {"type": "null"}}, "$ref": "#/$defs/a~1b%25"}, ["null"], ["1"]),
    ({"$defs": {"t": {"type": "object", "properties": {"n": {"$ref": "#/$defs/t"}}, "additionalProperties": False}},
      "$ref": "#/$defs/t"}, ["{}", '{"n":{"n":{}}}'], ['{"n":1}']),
    ({"allOf": [{"minimum": 3}, {"maximum": 4}], "type": "integer"}, ["3", "4"], ["2", "5"]),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["null", '"x"'], ["1"]),
    ({"type": "object", "minProperties": 1, "maxProperties": 1}, ['{"a":1}'], ["{}", '{"a":1,"b":2}']),
    ({"type": "object", "required": ["a", "b"]}, ['{"a":1,"b":2}'], ['{"a":1}']),
    ({"type": "string", "format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"', '"a"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-02-30"', '"2024-13-01"']),
    (True, ["1", "[{}]"], ["x"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), VERDICTS)
def test_valid_documents_are_taken_and_others_are_not(schema: object, good: list[str], bad: list[str]):
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for text in good:
        assert validator.is_valid(json.loads(text)), "the case itself is wrong"
    spec = schema_spec(schema)
    assert [takes(spec, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


# docs/structured-output.md lists these: valid documents that are never written, and two that are but should not be.
NARROWER = [
    ({"properties": {"a": {}, "b": {}}, "type": "object"}, '{"b":1,"a":1}'),
    ({"type": "integer"}, "1.0"),
    ({"type": "null"}, " null"),
    ({"type": "string"}, '"\\u0041"'),
]
WIDER = [({"type": "string", "format": "date"}, '"2023-02-29"'), ({"type": "object"}, '{"a":1,"a":2}')]


@pytest.mark.parametrize(("schema", "text"), NARROWER)
def test_known_differences_narrower(schema: object, text: str):
    jsonschema.validate(json.loads(text), schema)
    assert not takes(schema_spec(schema), text)


@pytest.mark.parametrize(("schema", "text"), WIDER)
def test_known_differences_wider(schema: object, text: str):
    assert takes(schema_spec(schema), text)


@pytest.mark.parametrize(
    "text", ['{"type": "object"}', '{"properties": {"a": {"type": "array"}}}', "{}", "true", '{"anyOf": [{}]}']
)
def test_white_space_between_tokens_has_an_end(text: str) -> None:
    """A model that prefers blanks to everything must come to something else in the end."""
    schema: object = json.loads(text)
    indented = '{\n\t  "a" : [\r\n 1 ,\n' + 60 * " " + "2 ] }"
    assert takes(schema_spec(schema), indented)
    assert takes(schema_spec(schema), '{"a":' + MAX_JSON_WHITE_SPACE * " " + "[]}")
    assert not takes(schema_spec(schema), '{"a":' + (MAX_JSON_WHITE_SPACE + 1) * " " + "[]}")
