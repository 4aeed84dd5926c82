"""What leaves for a worker: at once, one at a time, in order, whatever becomes of the stream."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from stepahead.scheduler.outbox import Outbox, start_now
from stepahead.scheduler.worker_stream import Call
from stepahead.v1 import worker_pb2


class Stream:
    """A call that completes writes when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.pending: list[asyncio.Future[None]] = []

    async def write(self, message: worker_pb2.RunStepsRequest) -> None:
        assert all(future.done() for future in self.pending), "a second write at a time ends the call"
        self.begun.append(message.ping.nonce)
        self.pending.append(asyncio.get_running_loop().create_future())
        await self.pending[-1]


def ping(nonce: int) -> worker_pb2.RunStepsRequest:
    return worker_pb2.RunStepsRequest(ping=worker_pb2.Ping(nonce=nonce))


def attached() -> tuple[Outbox, Stream]:
    outbox, stream = Outbox(), Stream()
    outbox.attach(cast(Call, stream))
    return outbox, stream


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_first_write_begins_in_the_turn_that_made_the_message() -> None:
    outbox, stream = attached()
    outbox.put(ping(1))
    assert stream.begun == [1]
    outbox.put(ping(2))
    outbox.put(ping(3))
    await turn()
    assert stream.begun == [1], "the others wait for it"
    for nonce in (1, 2, 3):
        assert stream.begun[-1] == nonce
        stream.pending[-1].set_result(None)
        await turn()
    outbox.put(ping(4))
    assert stream.begun == [1, 2, 3, 4]
    await outbox.detach()


async def test_messages_wait_for_a_stream_and_for_the_next_one() -> None:
    outbox = Outbox()
    outbox.put(ping(1))
    first, second = Stream(), Stream()
    outbox.attach(cast(Call, first))
    outbox.put(ping(2))
    await outbox.detach()
    outbox.put(ping(3))
    outbox.attach(cast(Call, second))
    second.pending[-1].set_result(None)
    await turn()
    assert (first.begun, second.begun) == ([1], [2, 3])
    await outbox.detach()
    outbox.put(ping(4))
    outbox.clear()
    outbox.attach(cast(Call, third := Stream()))
    assert third.begun == []


@pytest.mark.parametrize("error", [asyncio.InvalidStateError(), asyncio.CancelledError()])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_write_that_fails_is_nobodys_error(error: BaseException, at_once: bool) -> None:
    """The reader learns of the broken stream; the engine, which puts plans, must not."""
    outbox, stream = attached()
    if at_once:

        async def fail(_message: worker_pb2.RunStepsRequest) -> None:
            raise error

        stream.write = fail  # type: ignore[method-assign]
    outbox.put(ping(1))
    if not at_once:
        stream.pending[-1].set_exception(error)
        await turn()
    await outbox.detach()
    outbox.attach(cast(Call, again := Stream()))
    outbox.put(ping(2))
    assert again.begun == [2]


async def test_a_coroutine_that_begins_now_goes_on_as_a_task() -> None:
    """Values, exceptions and a cancel reach it as they would reach a task."""
    trace: list[Any] = []
    futures = [asyncio.get_running_loop().create_future() for _ in range(3)]

    async def work() -> None:
        trace.append("begun")
        trace.append(await futures[0])
        try:
            await futures[1]
        except ValueError:
            trace.append("error")
        try:
            await futures[2]
        except asyncio.CancelledError:
            trace.append("cancelled")
            raise

    task = start_now(work())
    assert trace == ["begun"]
    assert task is not None
    futures[0].set_result("value")
    await turn()
    futures[1].set_exception(ValueError())
    await turn()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert trace == ["begun", "value", "error", "cancelled"]
    assert task.cancelled()

    async def nothing() -> None:
        trace.append("done")

    assert start_now(nothing()) is None
    assert trace[-1] == "done"
