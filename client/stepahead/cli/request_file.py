"""Requests from a file of JSON lines.

Each line is an object: `prompt` (text, token ids, or messages with role and content) and any option of a
generation by its Python name. Options on the command line are the defaults of every line.
"""

import difflib
import json
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import click

from stepahead.client import GenerateOptions, GenerationRequest, InvalidRequestError
from stepahead.client.messages import generate_message

_NAMES = tuple(sorted(field.name for field in fields(GenerationRequest)))
# Options of the command line with another name than Python's.
_NAME_OF_OPTION = {"served_model": "model", "choice": "choices"}
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class FileRequest:
    """One request and where it stands; lines count from 1."""

    file: str
    line: int
    request: GenerationRequest

    @property
    def place(self) -> str:
        """Its place as compilers write it."""
        return f"{self.file}:{self.line}"


class _BadLine(Exception):
    """What is wrong with a line."""


def read_requests(path: Path, defaults: GenerateOptions) -> list[FileRequest]:
    """All requests of the file ("-": stdin).

    Every line is read before any is sent, so that a slip in the last one costs nobody the hour before it.

    Raises:
        click.UsageError: naming every line that is no request, or the file if it has none.
    """
    name = "stdin" if str(path) == "-" else str(path)
    # Lines end where the bytes say so: Python's own idea of lines would cut texts that hold U+2028.
    lines = (sys.stdin.buffer.read() if name == "stdin" else path.read_bytes()).split(b"\n")
    requests: list[FileRequest] = []
    faults: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(FileRequest(name, number, _read_request(line, defaults)))
        except _BadLine as fault:
            faults.append(f"{name}:{number}: {fault}")
    if faults:
        shown = faults[:_MAX_SHOWN]
        if len(faults) > len(shown):
            shown.append(f"and {len(faults) - len(shown)} more")
        raise click.UsageError("\n  ".join(["nothing was sent, there are lines that are no request:", *shown]))
    if not requests:
        raise click.UsageError(f"{name} holds no request")
    return requests


def _read_request(line: bytes, defaults: GenerateOptions) -> GenerationRequest:
    decoded = _parse(line)
    if not isinstance(decoded, dict):
        raise _BadLine("not an object")
    values = cast(dict[str, Any], decoded)
    for name in values:
        if name not in _NAMES:
            raise _BadLine(f"unknown {name}{_meant(name)}")
    if not isinstance(values.get("prompt"), str | list):
        raise _BadLine("prompt must be text, token ids or messages")
    if not values["prompt"]:
        raise _BadLine("prompt is empty")
    biases = values.get("logit_bias")
    if isinstance(biases, dict):
        # The keys of a JSON object are texts.
        values["logit_bias"] = {_token_id(key): bias for key, bias in cast(dict[str, Any], biases).items()}
    merged: dict[str, Any] = {**defaults, **values}
    request = GenerationRequest(**merged)
    try:
        generate_message(request)
    except InvalidRequestError as error:
        raise _BadLine(error.message) from error
    return request


def _parse(line: bytes) -> object:
    try:
        # Some editors begin a file with a byte order mark.
        return json.loads(
            line.decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_object_of,
        )
    except UnicodeDecodeError as error:
        raise _BadLine(f"no UTF-8 at byte {error.start + 1}") from error
    except ValueError as error:
        raise _BadLine(f"no JSON: {error}") from error
    except RecursionError as error:
        raise _BadLine("no JSON that can be read: it is nested too deeply") from error


def _refuse_constant(text: str) -> float:
    """NaN and the infinities: Python reads them, JSON has none."""
    raise _BadLine(f"no JSON: {text} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _BadLine(f"{text} is too large for a number")
    return number


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise _BadLine(f"{repeated} occurs twice")
    return values


def _meant(name: str) -> str:
    if name in _NAME_OF_OPTION:
        return f"; it is {_NAME_OF_OPTION[name]} here"
    close = difflib.get_close_matches(name, _NAMES, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(_NAMES)}"


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise _BadLine(f"logit_bias: {key!r} is no token id")
    return int(key)
