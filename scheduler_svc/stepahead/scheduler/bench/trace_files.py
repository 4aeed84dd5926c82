"""Recorded request traces: Azure's (lengths) and Mooncake's (lengths and the identity of prompt blocks).

Azure, 2023: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Published with Splitwise (Patel et al., ISCA 2024).
Mooncake: JSON lines with timestamp (ms), input_length, output_length and hash_ids, one per 512-token block of the
prompt; equal ids stand for equal blocks after equal prefixes. Published with Mooncake (Qin et al., FAST 2025).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A trace file is not what it should be; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    arrival_ns: int
    """Since the first request of the trace."""
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...]
    """Identity of each block of the prompt, the last one possibly partial; empty: nothing is known to be shared."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int
    """Prompt tokens that one block hash stands for."""


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Reads the first `limit` requests of a trace; the format follows from the file's suffix.

    Raises:
        TraceError: the file cannot be read, its suffix is unknown, or a line is malformed.
    """
    readers = {".csv": _azure, ".jsonl": _mooncake}
    reader = readers.get(path.suffix)
    if reader is None:
        raise TraceError(f"{path}: a trace is a .csv (Azure) or .jsonl (Mooncake) file")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = list(islice(reader(path, lines), limit))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if not requests:
        raise TraceError(f"{path}: holds no request")
    requests.sort(key=lambda request: request.arrival_ns)
    first_ns = requests[0].arrival_ns
    shifted = (
        TraceRequest(r.arrival_ns - first_ns, r.num_prompt_tokens, r.num_output_tokens, r.block_hashes)
        for r in requests
    )
    return Trace(path.stem, tuple(shifted), MOONCAKE_BLOCK_TOKENS)


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            # Seven digits of a second; datetime knows six.
            seconds, _, fraction = row["TIMESTAMP"].strip().partition(".")
            whole = datetime.fromisoformat(f"{seconds}+00:00").timestamp()
            arrival_ns = int(whole) * 10**9 + int(fraction.ljust(9, "0")[:9] or 0)
            yield _request(arrival_ns, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
        except (KeyError, ValueError, AttributeError) as error:
            raise TraceError(f"{path}, line {number}: {error!r}") from error


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            hashes = tuple(int(block_hash) for block_hash in row["hash_ids"])
            num_prompt_tokens = int(row["input_length"])
            if len(hashes) != -(-num_prompt_tokens // MOONCAKE_BLOCK_TOKENS):
                raise ValueError(f"{len(hashes)} hash_ids for {num_prompt_tokens} tokens")
            yield _request(int(row["timestamp"]) * 10**6, num_prompt_tokens, int(row["output_length"]), hashes)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: {error!r}") from error


def _request(
    arrival_ns: int, num_prompt_tokens: int, num_output_tokens: int, hashes: tuple[int, ...]
) -> TraceRequest:
    if num_prompt_tokens < 1 or num_output_tokens < 0:
        raise ValueError(f"{num_prompt_tokens} prompt tokens, {num_output_tokens} output tokens")
    return TraceRequest(arrival_ns, num_prompt_tokens, num_output_tokens, hashes)
