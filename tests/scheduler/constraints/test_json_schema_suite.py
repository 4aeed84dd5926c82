"""The JSON-Schema test suite, drafts 7 and 2020-12: what is served never lets an invalid document through.

`suite/` holds the mandatory tests, one group per line, as the `jsonschema` package (source distribution) carries
them (MIT, see LICENSE there). A schema is either refused by name, or each of its instances is written byte by byte
against the grammar. The grammar may be narrower than the schema; where it is, the reason stands below.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepahead.scheduler.constraints.engine import Engine, grammar_of
from stepahead.scheduler.constraints.errors import ConstraintInvalid, MatcherFailed
from stepahead.scheduler.constraints.matcher import Matcher
from stepahead.scheduler.constraints.spec import ConstraintKind, ConstraintSpec
from stepahead.scheduler.constraints.token_table import TokenTable

SUITE = Path(__file__).parent / "suite"
BYTES = TokenTable((*(bytes([value]) for value in range(256)), b""), (256,))

NARROWER = {
    "const": "a number is written as the schema writes it: 1 and 1.0 are one value, and one spelling",
    "enum": "as const",
    "type": "an integer has no fraction",
    "format": "a format is kept to, not only noted",
    "ref": "keywords beside $ref count in every draft, not only since 2019-09",
}
"""Files with valid instances that the grammar does not write, and why."""

SERVED = {"draft7": (139, 499, 10), "draft2020-12": (151, 551, 19)}
"""Schemas served, their instances, and valid ones among these that the grammar does not write."""


def orders(value: Any) -> Iterator[Any]:
    """A grammar fixes the order of properties: an object is tried in every order."""
    if isinstance(value, dict) and 1 < len(value) <= 4:
        yield from map(dict, itertools.permutations(value.items()))
    else:
        yield value


def writes(matcher: Matcher, text: str) -> bool:
    """Whether the grammar allows the text byte by byte, and its end."""
    return all(matcher.accept(byte) for byte in text.encode("utf-8", "surrogatepass")) and matcher.allows_end


def compiled(engine: Engine, schema: str) -> tuple[Matcher | None, str]:
    """A matcher, or why the schema is refused."""
    try:
        return engine.build(grammar_of(ConstraintSpec(ConstraintKind.JSON_SCHEMA, (schema,)))), ""
    except (ConstraintInvalid, MatcherFailed) as error:
        return None, str(error)


@pytest.mark.parametrize("draft", SERVED)
def test_no_invalid_document_passes(draft: str) -> None:
    """I2, V4: refused by name, or enforced."""
    engine = Engine(BYTES)
    num_served = num_instances = 0
    narrower: list[str] = []
    for line in (SUITE / f"{draft}.jsonl").read_text().splitlines():
        group = json.loads(line)
        beginning, refusal = compiled(engine, json.dumps(group["schema"]))
        if beginning is None:
            assert refusal, group["description"]
            continue
        num_served += 1
        for test in group["tests"]:
            num_instances += 1
            texts = (json.dumps(value, ensure_ascii=False) for value in orders(test["data"]))
            written = any(writes(beginning.fork(), text) for text in texts)
            assert test["valid"] or not written, (group["file"], group["description"], test["description"])
            if test["valid"] and not written:
                narrower.append(group["file"])
    assert set(narrower) <= set(NARROWER)
    assert (num_served, num_instances, len(narrower)) == SERVED[draft]
