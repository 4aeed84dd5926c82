"""The front end's budget of messages.

One stream message costs some 30 us of the loop that also commits and plans steps. Unbudgeted, 256 streams at
5 ms a step raise the device's idle time from 0.3 % to 20 %: the next boundary waits behind 256 ready handlers.
So a stream that has news waits for its turn: first tokens and ends go at once, the rest in round-robin order at
a bounded rate, in slices, with the loop free in between. While streams are few nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

SLICE = 16
"""Streams woken at once."""

PERIOD_S = 2 * SLICE * 50e-6
"""From one slice to the next: twice what its messages take, so that the loop is free half of the time. A boundary
passes through several turns of the loop, and would wait for a slice in each if the next slice were always ready."""


class StreamWriter(Protocol):
    """A stream that turns news into one message when it is woken."""

    queued: bool
    """Whether it waits for its turn; owned by the budget."""
    woken: bool
    """Whether it has its turn and has not taken it yet; set by the budget, cleared by the stream."""

    def wake(self) -> None:
        """Its turn: write everything pending as one message."""
        ...


class MessageBudget:
    """A token bucket over all streams, refilled at `messages_per_second`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, messages_per_second: int) -> None:
        self._loop = loop
        self._rate = float(messages_per_second)
        # A burst of 50 ms worth of messages: short answers of many streams still leave at once.
        self._burst = max(float(SLICE), self._rate / 20)
        self._available = self._burst
        self._refilled_at = loop.time()
        self._queue: deque[StreamWriter] = deque()
        self._timer: asyncio.Handle | None = None
        self.num_messages = 0

    def request(self, writer: StreamWriter) -> None:
        """The stream has news that can wait. `pump` must follow, once for any number of requests."""
        if not writer.queued:
            writer.queued = True
            self._queue.append(writer)

    def urgent(self, writer: StreamWriter) -> None:
        """The stream has news that must not wait: a first token, an end."""
        writer.queued = False
        self._wake(writer)

    def pump(self) -> None:
        """Wakes queued streams as far as the budget reaches; the rest follow on a timer."""
        if not self._queue or self._timer is not None:
            return
        self._turn()

    def _turn(self) -> None:
        self._timer = None
        now = self._loop.time()
        self._available = min(self._burst, self._available + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        for _ in range(SLICE):
            if not self._queue or self._available < 1:
                break
            writer = self._queue.popleft()
            if writer.queued:  # else it was woken urgently meanwhile
                writer.queued = False
                self._wake(writer)
        if not self._queue:
            return
        if self._available >= 1:
            self._timer = self._loop.call_later(min(PERIOD_S, SLICE / self._rate), self._turn)
        else:
            # Wait for a handful, so that the timer itself costs little.
            delay = (min(len(self._queue), SLICE // 2) - self._available) / self._rate
            self._timer = self._loop.call_later(delay, self._turn)

    def _wake(self, writer: StreamWriter) -> None:
        if writer.woken:
            return  # everything pending goes into the message it is about to write
        writer.woken = True
        self._available -= 1
        self.num_messages += 1
        writer.wake()
