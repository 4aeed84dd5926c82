"""The canonical line of every request that has ended, written beside the turns of the step loop.

A line takes 40 to 60 us. A hundred requests may end in one step, and the next boundary would wait for their lines.
"""

from __future__ import annotations

import asyncio
from collections import deque

import structlog

from stepahead.scheduler.core import FinishReason
from stepahead.scheduler.live_request import LiveRequest

log = structlog.get_logger("requests")

SLICE = 8
"""Lines at once, at most."""
PAUSE_S = 0.001
"""Between an end and its line, and between slices: 8,000 lines a second, many times what a scheduler accepts."""


class EndLog:
    """Writes lines in the order of the ends, some milliseconds later. Nothing is dropped; `close` at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ends: deque[tuple[LiveRequest, FinishReason]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, live: LiveRequest, reason: FinishReason) -> None:
        """A request has ended; it does not change any more."""
        self._ends.append((live, reason))
        if self._closed:
            self.close()
        elif self._timer is None:
            self._timer = self._loop.call_later(PAUSE_S, self._write_slice)

    def close(self) -> None:
        """Writes what is left, now, and from now on every line at once: the loop may not run any more."""
        self._closed = True
        while self._ends:
            _write(*self._ends.popleft())

    def _write_slice(self) -> None:
        self._timer = None
        try:
            for _ in range(min(SLICE, len(self._ends))):
                _write(*self._ends.popleft())
        finally:  # a line that cannot be written does not hold up the others
            if self._ends:
                self._timer = self._loop.call_later(PAUSE_S, self._write_slice)


def _write(live: LiveRequest, reason: FinishReason) -> None:
    times = live.times
    log.info(
        "request ended",
        request_id=live.accepted.request_id,
        request_key=live.key,
        reason=reason.value,
        status=live.error.code.name if live.error else "OK",
        choices=len(live.choices),
        prompt_tokens=len(live.accepted.prompt_token_ids),
        output_tokens=live.num_output_tokens,
        preemptions=live.preemptions,
        window_replays=sum(choice.window_replays for choice in live.choices),
        approximate_replays=sum(choice.approximate_replays for choice in live.choices),
        queue_ms=round(max(0, (times.admitted_ns or times.finished_ns) - times.accepted_ns) / 1e6, 3),
        first_token_ms=round(max(0, times.first_token_ns - times.accepted_ns) / 1e6, 3),
        total_ms=round((times.finished_ns - times.accepted_ns) / 1e6, 3),
    )
