"""The writer of one Generate or Attach call: one message per turn, begun in the turn.

    budget: wake --> take, serialize, begin the write ..... gRPC: written --> take again if woken meanwhile

Waking a task for every message would cost a future, a callback and a turn of the loop. So the call's task waits for
the end of the stream alone, and its coroutine is driven by hand, as a task drives one.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from stepahead.scheduler.guard import Context
from stepahead.scheduler.subscription import Events, Subscription
from stepahead.v1 import generation_pb2

Response = generation_pb2.GenerateResponse | generation_pb2.AttachResponse


class EventStream:
    """See the module docstring. The budget's `StreamWriter`."""

    __slots__ = ("_coroutine", "_ended", "_is_waiting", "_keepalive_s", "_last_write", "_loop", "_timer", "queued",
                 "silent", "woken")  # fmt: skip

    def __init__(self, keepalive_s: float) -> None:
        """Starts the keepalive clock; `run` writes.

        Args:
            keepalive_s: a stream that was silent for so long says that it lives.
        """
        self.queued = False
        self.woken = False
        self.silent = False
        """Whether the stream was woken because it has been silent for too long."""
        self._is_waiting = False
        """Whether the coroutine waits for a turn; else it has not begun, or waits for gRPC."""
        self._coroutine: Coroutine[Any, Any, None] | None = None
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._last_write = self._loop.time()
        self._timer = self._loop.call_later(keepalive_s, self._tick)

    def wake(self) -> None:
        """Its turn: writes what is new, now or once gRPC has taken the message before."""
        if self._is_waiting:
            self._go_on()

    async def run(
        self,
        subscription: Subscription,
        context: Context,
        make: Callable[[], Response],
        take: Callable[[Subscription, Events], bool],
    ) -> None:
        """Writes turn by turn until the request has ended. A cancel ends the writing.

        Args:
            subscription: what to write.
            context: where to.
            make: an empty message.
            take: adds news to a message; returns whether nothing follows.

        Raises:
            ApiError: what the request ended with.
        """
        self._coroutine = self._write_all(subscription, context, make, take)
        try:
            self._go_on()
            await self._ended
        finally:
            self._ended.cancel()
            self._coroutine.close()

    async def _write_all(
        self,
        subscription: Subscription,
        context: Context,
        make: Callable[[], Response],
        take: Callable[[Subscription, Events], bool],
    ) -> None:
        live = subscription.live
        write = context.write
        done = False
        while not done:
            if not self.woken and not self.silent:
                await _a_turn()
            self.woken = False
            response = make()
            done = take(subscription, response.events)
            if not response.events and self.silent:
                response.events.add().keepalive.phase = live.phase
            if response.events:
                await write(response)
                self.silent = False
                self._last_write = self._loop.time()
        if live.error is not None:
            raise live.error

    def _go_on(self, waited_for: asyncio.Future[Any] | None = None) -> None:
        """Runs the coroutine to its next wait."""
        if self._ended.done():
            # The call is over, and what it waited for comes late. A task would have cancelled it; here a write to a
            # client that is gone may still fail, and an error that nobody looks at is logged as one.
            if waited_for is not None and not waited_for.cancelled():
                waited_for.exception()
            return
        self._is_waiting = False
        assert self._coroutine is not None
        try:
            waits_for = self._coroutine.send(None)
        except StopIteration:
            self._ended.set_result(None)
        except asyncio.CancelledError:
            self._ended.cancel()
        except Exception as error:  # noqa: BLE001 - the call's task raises it
            self._ended.set_exception(error)
        else:
            if waits_for is None:
                self._is_waiting = True
            else:
                waits_for.add_done_callback(self._go_on)

    def _tick(self) -> None:
        """One timer for the stream's life, moved when it fires: a timer per message would cost as much as one."""
        due_in = self._last_write + self._keepalive_s - self._loop.time()
        if due_in <= 0:
            self.silent = True
            self.wake()
            due_in = self._keepalive_s
        self._timer = self._loop.call_later(due_in, self._tick)

    def close(self) -> None:
        """No more turns."""
        self._timer.cancel()


@types.coroutine
def _a_turn() -> Generator[None, None, None]:
    """Waits until `wake`."""
    yield
