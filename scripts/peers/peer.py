"""The contract of `stepahead bench ... --vs COMMAND`, for scripts that put another engine behind it.

The command starts a process that loads its model and writes one JSON line on standard output:

    {"ready": NAME, "open_loop": BOOL, ...facts such as versions and precision}

`open_loop` says whether it can take requests while others run. Then, for every line on standard input,

    {"requests": [{"at_s": SECONDS, "prompt": [ID, ...], "output_tokens": COUNT}, ...]}

it answers every request, greedily, end-of-sequence ignored, with exactly so many tokens. Request i is handed over
`at_s` after the start (0 for all in a closed batch). Then it writes one line:

    {"token_times_s": [[SECONDS, ...], ...]}

per request, the time since the start at which the caller could have read each token. `{"error": TEXT}` instead of
either line ends the benchmark. End of file on standard input ends the process. Its memory is read from outside,
with all its children.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Request:
    """One request of a workload."""

    at_s: float
    prompt: list[int]
    output_tokens: int


Run = Callable[[list[Request], Callable[[], float]], list[list[float]]]
"""Given requests and a clock that says seconds since the start, returns every request's token times."""


def take_stdout() -> TextIO:
    """Keeps standard output for the contract: what libraries print goes to stderr from now on."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def serve(channel: TextIO, name: str, run: Run, *, open_loop: bool, **facts: object) -> None:
    """Speaks the contract until standard input ends."""

    def say(fields: dict[str, object]) -> None:
        channel.write(json.dumps(fields) + "\n")
        channel.flush()

    say({"ready": name, "open_loop": open_loop, **facts})
    for line in sys.stdin:
        requests = [Request(**fields) for fields in json.loads(line)["requests"]]
        start = time.perf_counter()
        say({"token_times_s": run(requests, lambda start=start: time.perf_counter() - start)})
