"""The real tokenizer of SmolLM2 in front of the engine and its sandbox."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from stepahead.scheduler.constraints.compiler import ConstraintCompiler
from stepahead.scheduler.constraints.token_table import token_table
from stepahead.scheduler.text.codec import CodecSettings, TextCodec
from tests.scheduler.constraints.builders import schema_spec, text_of, walk

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "größer"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.smollm2
async def test_i2_walks_over_a_real_vocabulary_validate():
    path = os.environ.get("STEPAHEAD_TEST_SMOLLM2")
    if path is None:
        pytest.skip("STEPAHEAD_TEST_SMOLLM2 names no GGUF file")
    reference = PreTrainedTokenizerFast.from_pretrained(Path(path).parent, gguf_file=Path(path).name)
    codec = TextCodec(reference.backend_tokenizer, settings=CodecSettings(eos_token_ids=(reference.eos_token_id,)))
    table = token_table(codec, codec.vocab_size)
    compiler = ConstraintCompiler(lambda: table)
    compiled = await compiler.compile(schema_spec(SCHEMA))
    for seed in range(20):
        tokens = walk(compiled.matcher(), seed, table=table)
        text = codec.decode(tokens, skip_special_tokens=True)
        assert text == text_of(tokens, table)
        jsonschema.validate(json.loads(text), SCHEMA)
        # The tokenizer's own way of writing the text is allowed as well.
        again = compiled.matcher()
        again.replay(codec.encode(text))
        assert again.allows_end
    await compiler.close()
