"""The process in which constraints of clients are parsed, compiled and tried: it may be killed at any time.

It speaks over stdin and stdout: 4 bytes of length, big-endian, then a JSON object of UTF-8. First comes
{memory_bytes, eos_ids, pieces} (token bytes as Latin-1 text), answered by {ready}; then {kind, texts} each answered
by {grammar, cost_bytes} or by {field, description}. It ends with its input.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from stepahead.scheduler.constraints.engine import Engine, grammar_of
from stepahead.scheduler.constraints.errors import ConstraintInvalid, MatcherError
from stepahead.scheduler.constraints.spec import ConstraintKind, ConstraintSpec
from stepahead.scheduler.constraints.token_table import TokenTable

NUM_PROBE_STEPS: Final = 32
"""Tokens that a constraint is tried with: some limits show only behind the first mask."""

# The serving process builds what passes here in threads of 2 MiB of stack or more: what would overflow those must
# overflow here.
_STACK_BYTES: Final = 1 * 2**20


def main() -> None:
    """Answers until the input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Nothing but answers may reach the pipe.
    os.dup2(2, 1)
    hello = _read(requests)
    if hello is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (hello["memory_bytes"], hello["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pieces = tuple(piece.encode("latin-1") for piece in hello["pieces"])
    engine = Engine(TokenTable(pieces, tuple(hello["eos_ids"])))
    _write(answers, {"ready": True})
    # From here on only a client's constraint makes the engine print, and its error is answered.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while (request := _read(requests)) is not None:
        spec = ConstraintSpec(ConstraintKind(request["kind"]), tuple(request["texts"]))
        _write(answers, _answer_in_thread(engine, spec))


def _answer_in_thread(engine: Engine, spec: ConstraintSpec) -> dict[str, object]:
    answers: list[dict[str, object]] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: answers.append(_answer(engine, spec)))
    thread.start()
    thread.join()
    # An exception in the thread was a bug; without an answer this process ends, and the caller sees that.
    return answers[0]


def _answer(engine: Engine, spec: ConstraintSpec) -> dict[str, object]:
    before = _resident_bytes()
    try:
        grammar = grammar_of(spec)
        _probe(engine, grammar)
    except ConstraintInvalid as error:
        return {"field": error.field, "description": error.description}
    except MatcherError as error:
        return {"field": spec.field, "description": str(error).removeprefix("constraint: ")}
    return {"grammar": grammar, "cost_bytes": max(len(grammar), _resident_bytes() - before)}


def _probe(engine: Engine, grammar: str) -> None:
    """Walks through the first masks, along tokens spread over what is allowed."""
    matcher = engine.build(grammar)
    for step in range(NUM_PROBE_STEPS):
        allowed = int.from_bytes(matcher.mask(), "little")
        # Skips ahead by a few candidates, so that not every step takes the lowest id.
        for _ in range(step % 3):
            allowed = allowed & (allowed - 1) or allowed
        if not matcher.accept((allowed & -allowed).bit_length() - 1) or matcher.has_ended:
            return


def _resident_bytes() -> int:
    """Memory in use (Linux; elsewhere 0, and a constraint then counts as its text)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    header = stream.read(4)
    if len(header) < 4:
        return None
    return cast("dict[str, Any]", json.loads(stream.read(int.from_bytes(header, "big"))))


def _write(stream: BinaryIO, answer: dict[str, object]) -> None:
    encoded = json.dumps(answer).encode()
    stream.write(len(encoded).to_bytes(4, "big") + encoded)
    stream.flush()


if __name__ == "__main__":
    main()
