"""A Generate call's writer: one message per turn, begun in the turn, whatever becomes of the call."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepahead.scheduler.errors import RequestCancelled
from stepahead.scheduler.event_stream import EventStream
from stepahead.scheduler.subscription import Events
from stepahead.v1 import generation_pb2


class Call:
    """A server's call that completes writes when the test says so."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.pending: list[asyncio.Future[None]] = []

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        assert all(future.done() for future in self.pending), "a second write at a time ends the call"
        self.written.append([token for event in message.events for token in event.delta.token_ids])
        self.pending.append(asyncio.get_running_loop().create_future())
        await self.pending[-1]


class World:
    """A stream, its call, and a request whose news the test makes."""

    def __init__(self, keepalive_s: float = 60.0) -> None:
        self.call = Call()
        self.stream = EventStream(keepalive_s)
        self.news: list[int] = []
        self.is_over = False
        self.live = SimpleNamespace(error=None, phase=generation_pb2.Keepalive.PHASE_DECODE)

    def take(self, _subscription: object, events: Events) -> bool:
        if self.news:
            events.add().delta.token_ids.extend(self.news)
            self.news = []
        return self.is_over

    def tell(self, *tokens: int) -> None:
        """News, and a turn, as the budget gives one."""
        self.news += tokens
        self.stream.woken = True
        self.stream.wake()

    async def run(self) -> None:
        subscription = cast(Any, SimpleNamespace(live=self.live))
        await self.stream.run(
            subscription, cast(Any, self.call), generation_pb2.GenerateResponse, cast(Any, self.take)
        )

    async def start(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.run())
        await turn()
        return task

    async def complete(self) -> None:
        self.call.pending[-1].set_result(None)
        await turn()


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_write_begins_in_the_turn_and_its_successor_when_it_is_written() -> None:
    world = World()
    task = await world.start()
    assert world.call.written == []
    world.tell(1)
    assert world.call.written == [[1]], "no turn of the loop in between"
    assert not world.stream.woken
    world.tell(2)
    world.tell(3)
    assert world.stream.woken, "its turn waits until the write is done"
    await turn()
    assert world.call.written == [[1]]
    await world.complete()
    assert world.call.written == [[1], [2, 3]]
    await world.complete()
    world.stream.wake()
    await turn()
    assert len(world.call.written) == 2, "a turn without news is no message"
    world.is_over = True
    world.tell(4)
    await world.complete()
    await task
    assert world.call.written[-1] == [4]


async def test_a_turn_given_before_the_call_stands_is_taken_when_it_does() -> None:
    """Initial metadata goes first: until `run`, nothing is written."""
    world = World()
    world.tell(1)
    assert world.call.written == []
    task = await world.start()
    assert world.call.written == [[1]]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_request_that_failed_raises_behind_its_last_message() -> None:
    world = World()
    task = await world.start()
    world.live.error = RequestCancelled("no more")
    world.is_over = True
    world.tell(1)
    await world.complete()
    assert world.call.written == [[1]]
    with pytest.raises(RequestCancelled, match="no more"):
        await task


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_write_that_fails_ends_the_call_with_its_error(at_once: bool) -> None:
    world = World()
    if at_once:

        async def fail(_message: object) -> None:
            raise RuntimeError("the transport is gone")

        world.call.write = fail  # type: ignore[method-assign]
    task = await world.start()
    world.tell(1)
    if not at_once:
        world.call.pending[-1].set_exception(RuntimeError("the transport is gone"))
    with pytest.raises(RuntimeError, match="the transport"):
        await task


@pytest.mark.parametrize("in_a_write", [True, False])
async def test_after_a_cancel_nothing_is_written(in_a_write: bool) -> None:
    """F6: the client is gone; a write that completes late, or a late turn, meets no stream."""
    world = World()
    task = await world.start()
    if in_a_write:
        world.tell(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    written = list(world.call.written)
    if in_a_write:
        await world.complete()
    world.tell(2)
    await turn()
    assert world.call.written == written


async def test_a_write_that_fails_behind_a_cancel_is_no_error_of_the_loop() -> None:
    """The client is gone in the middle of a write: common, and nothing that a log should name."""
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context["message"]))
    world = World()
    task = await world.start()
    world.tell(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    world.call.pending.pop().set_exception(RuntimeError("the call is dead"))
    await turn()
    gc.collect()
    assert errors == []


async def test_a_silent_stream_says_that_it_lives() -> None:
    world = World(keepalive_s=0.01)
    phases: list[int] = []
    written = asyncio.Event()

    async def write(message: generation_pb2.GenerateResponse) -> None:
        phases.extend(event.keepalive.phase for event in message.events)
        written.set()

    world.call.write = write  # type: ignore[method-assign]
    task = await world.start()
    await written.wait()
    assert phases == [generation_pb2.Keepalive.PHASE_DECODE]
    assert not world.stream.silent
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    world.stream.close()
