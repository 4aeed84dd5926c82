"""Requests from a file of JSON lines.

Each line is an object: `prompt` (text, token ids, or messages with role and content) and any option of a
generation by its Python name. Options on the command line are the defaults of every line.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import click

from stepahead.client import GenerateOptions, GenerationRequest

_NAMES = frozenset(field.name for field in fields(GenerationRequest))


def read_requests(path: Path, defaults: GenerateOptions) -> list[GenerationRequest]:
    """All requests of the file ("-": stdin). Raises click.ClickException naming the first bad line."""
    text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    return [
        _read_request(line, number, defaults)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]


def _read_request(line: str, number: int, defaults: GenerateOptions) -> GenerationRequest:
    try:
        decoded: object = json.loads(line)
    except ValueError as error:
        raise click.UsageError(f"line {number}: {error}") from error
    if not isinstance(decoded, dict):
        raise click.UsageError(f"line {number}: not an object")
    values = cast(dict[str, Any], decoded)
    unknown = sorted(values.keys() - _NAMES)
    if unknown:
        raise click.UsageError(
            f"line {number}: unknown {', '.join(unknown)}; known are {', '.join(sorted(_NAMES))}"
        )
    if not isinstance(values.get("prompt"), str | list):
        raise click.UsageError(f"line {number}: prompt must be text, token ids or messages")
    biases = values.get("logit_bias")
    if isinstance(biases, dict):
        # The keys of a JSON object are texts.
        values["logit_bias"] = {_token_id(key, number): bias for key, bias in cast(dict[str, Any], biases).items()}
    merged: dict[str, Any] = {**defaults, **values}
    return GenerationRequest(**merged)


def _token_id(key: str, number: int) -> int:
    if not key.isdecimal():
        raise click.UsageError(f"line {number}: logit_bias: {key!r} is no token id")
    return int(key)
