"""The front end's budget of messages.

One stream message costs some 30 to 60 us of the loop that also commits and plans steps. Unbudgeted, 256 streams at
5 ms a step raise the device's idle time from 0.3 % to 20 %: the next boundary waits behind 256 ready handlers.
So a stream that has news waits for its turn: first tokens and ends before all others and whatever the rate, the
rest in round-robin order at a bounded rate. Turns come in slices, with the loop free in between. While streams are
few nobody waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

SLICE = 16
"""Streams that have their turn at once, at most. The loop then rests for as long as they took: whatever a message
costs on this machine under this load, the loop is free half of the time. A boundary passes through several turns of
the loop, and would wait for a slice in each if the next one were always ready."""


class StreamWriter(Protocol):
    """A stream that turns news into one message when it is woken, there and then."""

    queued: bool
    """Whether it waits for its turn; owned by the budget."""
    woken: bool
    """Whether it has its turn and has not taken it yet; set by the budget, cleared by the stream."""

    def wake(self) -> None:
        """Its turn: write everything pending as one message."""
        ...


class MessageBudget:
    """A token bucket over all streams, refilled at `messages_per_second`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        messages_per_second: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts with a full bucket.

        Args:
            loop: runs the streams.
            messages_per_second: refills the bucket.
            clock: seconds; finer than the loop's, which may stand still while callbacks run.
        """
        self._loop = loop
        self._rate = float(messages_per_second)
        # A burst of 50 ms worth of messages: short answers of many streams still leave at once.
        self._burst = max(float(SLICE), self._rate / 20)
        self._available = self._burst
        self._refilled_at = loop.time()
        self._queue: deque[StreamWriter] = deque()
        self._urgent: dict[StreamWriter, None] = {}
        self._timer: asyncio.Handle | None = None
        self._rests = False
        """Whether a slice is about to begin, under way or rested from: nobody starts another one or shortens it."""
        self._clock = clock
        self.num_messages = 0

    def request(self, writer: StreamWriter) -> None:
        """The stream has news that can wait. `pump` must follow, once for any number of requests."""
        if not writer.queued:
            writer.queued = True
            self._queue.append(writer)

    def urgent(self, writer: StreamWriter) -> None:
        """The stream has news that must not wait: a first token, an end."""
        writer.queued = False
        if writer.woken:
            return
        self._urgent[writer] = None
        if self._rests:
            return
        if self._timer is not None:
            self._timer.cancel()
        # Not at once: others may follow in this turn of the loop, and a slice is for all of them.
        self._rests = True
        self._timer = self._loop.call_soon(self._turn)

    def pump(self) -> None:
        """Lets queued streams have turns soon, as far as the budget reaches; the rest follow on a timer.

        Not at once: who calls may be about to plan a step.
        """
        if self._queue and self._timer is None and not self._rests:
            self._timer = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        # Streams that are woken may ask, or end others, which have news then: all that waits for the timer below.
        self._timer, self._rests = None, True
        now = self._loop.time()
        self._available = min(self._burst, self._available + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        slice_began = self._clock()
        num_woken = 0
        while num_woken < SLICE and (writer := self._next()) is not None:
            num_woken += self._wake(writer)
        if num_woken:
            self._timer = self._loop.call_later(self._clock() - slice_began, self._turn)
            return
        self._rests = False
        if self._queue:
            # Wait for a handful, so that the timer itself costs little.
            delay = (min(len(self._queue), SLICE // 2) - self._available) / self._rate
            self._timer = self._loop.call_later(delay, self._turn)

    def _next(self) -> StreamWriter | None:
        """Whose turn it is."""
        if self._urgent:
            writer = next(iter(self._urgent))
            del self._urgent[writer]
            writer.queued = False
            return writer
        while self._queue and self._available >= 1:
            writer = self._queue.popleft()
            if writer.queued:  # else it was urgent meanwhile
                writer.queued = False
                return writer
        return None

    def _wake(self, writer: StreamWriter) -> bool:
        """Gives a stream its turn; False if it has one that it has not taken yet."""
        if writer.woken:
            return False  # everything pending goes into the message it is about to write
        writer.woken = True
        self._available -= 1
        self.num_messages += 1
        writer.wake()
        return True
