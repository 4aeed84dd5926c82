"""The sending half of one RunSteps stream: a queue that any thread fills and one task empties.

A gRPC call takes one write at a time; with a single writer per stream there is nothing to interleave, and the
final status leaves behind everything queued before it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stepahead.v1.worker_pb2 import RunStepsResponse
    from stepahead.worker.status import StreamStatus


class StepStream:
    """Messages to one client, then a status.

    Args:
        loop: the event loop whose task calls `messages`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[RunStepsResponse, int]] = deque()
        self._wake = asyncio.Event()
        self.is_over = False
        """No message is read from or queued to this stream any more; event loop only."""
        self.status: StreamStatus | None = None
        """How the stream ends, once it is over; None is OK."""

    def send(self, message: RunStepsResponse, device_end_ns: int = 0) -> None:
        """Queues a message; `device_end_ns` dates a boundary's device event. Any thread; keeps order."""
        self._loop.call_soon_threadsafe(self._push, message, device_end_ns)

    def end(self, status: StreamStatus | None) -> None:
        """Ends the stream behind everything queued. Any thread."""
        self._loop.call_soon_threadsafe(self.finish, status)

    def finish(self, status: StreamStatus | None) -> None:
        """Ends the stream behind everything queued. Event loop only; the first status counts."""
        if not self.is_over:
            self.is_over = True
            self.status = status
            self._wake.set()

    def supersede(self, status: StreamStatus) -> None:
        """Ends the stream now: another one has taken its session, and what is queued belongs there."""
        self._queue.clear()
        self.finish(status)

    async def messages(self) -> AsyncIterator[RunStepsResponse]:
        """Messages in order until the stream is over."""
        while True:
            while self._queue:
                message, device_end_ns = self._queue.popleft()
                if device_end_ns:
                    message.boundary.send_delay_ns = time.monotonic_ns() - device_end_ns
                yield message
            if self.is_over:
                return
            self._wake.clear()
            await self._wake.wait()

    def _push(self, message: RunStepsResponse, device_end_ns: int) -> None:
        if not self.is_over:
            self._queue.append((message, device_end_ns))
            self._wake.set()
