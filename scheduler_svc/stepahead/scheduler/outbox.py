"""What leaves for a worker: one write at a time, the first one at once.

    boundary read -> commit, plan -> put -> written      in one turn of the loop, before anybody's tokens

A task that waits to be woken would stand behind everything that is ready in the loop by then, which under many
streams is some milliseconds of their messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any

import grpc

from stepahead.scheduler.worker_stream import Call
from stepahead.v1 import worker_pb2


class Outbox:
    """Messages to one worker, in order; streams come and go. A second concurrent write would end a call."""

    def __init__(self) -> None:
        self._messages: deque[worker_pb2.RunStepsRequest] = deque()
        self._call: Call | None = None
        self._is_writing = False
        self._rest: asyncio.Task[None] | None = None

    def put(self, message: worker_pb2.RunStepsRequest) -> None:
        """Writes a message, or queues it behind the others. Never blocks."""
        self._messages.append(message)
        self._begin()

    def clear(self) -> None:
        """What was not written is not wanted any more."""
        self._messages.clear()

    def attach(self, call: Call) -> None:
        """A stream stands: writes what is queued."""
        self._call = call
        self._begin()

    async def detach(self) -> None:
        """The stream is over; what is put from now on waits for another one."""
        self._call = None
        if self._rest is not None:
            self._rest.cancel()
            await asyncio.gather(self._rest, return_exceptions=True)

    def _begin(self) -> None:
        if self._call is not None and not self._is_writing:
            self._rest = start_now(self._write(self._call))

    async def _write(self, call: Call) -> None:
        self._is_writing = True
        try:
            # The stream is over: its reader is told as well, and a new one gets what this one has not.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                while self._messages:
                    await call.write(self._messages.popleft())
        finally:
            self._is_writing = False


def start_now(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Runs a coroutine here to its first suspension; the rest of it is a task, or None if there is no rest.

    As eager tasks of Python 3.12.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    task = asyncio.get_running_loop().create_task(_finish(_Rest(coroutine, waits_for)))
    # A task that is cancelled before its first step has never looked at the coroutine.
    task.add_done_callback(lambda _: coroutine.close())
    return task


async def _finish(rest: _Rest) -> None:
    await rest


class _Rest:
    """What is left of a coroutine that has been begun: waits for what it waits for, in its place."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    value = yield waits_for
                except BaseException as error:  # noqa: BLE001 - a cancel, too, is the coroutine's to take
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(value)
        except StopIteration:
            return
