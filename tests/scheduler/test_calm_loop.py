"""The scheduler's event loop: gRPC's wake-ups, and pauses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from typing_extensions import override

from stepahead.scheduler import calm_loop
from stepahead.scheduler.calm_loop import WAKE_UPS, Breath, CalmLoop, is_completion_reader

NUM_WAKE_UPS = 200


class PollerCompletionQueue:
    """As grpc.aio's: takes one byte, and hands out all that has completed."""

    def __init__(self) -> None:
        self.read_socket, self.write_socket = socket.socketpair()
        self.read_socket.setblocking(False)
        self.completed: list[int] = []
        self.handed_out: list[list[int]] = []

    def complete(self, operation: int) -> None:
        self.completed.append(operation)
        self.write_socket.send(b"1")

    def handle_events(self, _loop: object) -> None:
        assert self.read_socket.recv(1)
        self.handed_out.append(self.completed)
        self.completed = []


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until the condition holds."""
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


def test_all_wake_ups_that_wait_are_one() -> None:
    queue = PollerCompletionQueue()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(queue.read_socket, functools.partial(queue.handle_events, loop))
        for operation in range(NUM_WAKE_UPS):
            queue.complete(operation)
        await until(lambda: len(queue.handed_out) > 0)
        assert queue.handed_out == [list(range(NUM_WAKE_UPS))]
        queue.complete(NUM_WAKE_UPS)
        await until(lambda: len(queue.handed_out) > 1)
        assert queue.handed_out[1:] == [[NUM_WAKE_UPS]], "and the next one is not lost"
        loop.remove_reader(queue.read_socket)

    with asyncio.Runner(loop_factory=CalmLoop) as runner:
        runner.run(run())
    queue.read_socket.close()
    queue.write_socket.close()


def test_a_socket_holds_fewer_wake_ups_than_are_taken_at_once() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with reader, writer, contextlib.suppress(BlockingIOError):
        for _ in range(WAKE_UPS):
            writer.send(b"1")
        pytest.fail("the socket is not full yet")


def test_other_readers_are_left_alone() -> None:
    seen: list[bytes] = []

    async def run() -> None:
        reader, writer = socket.socketpair()
        loop = asyncio.get_running_loop()
        with reader, writer:
            loop.add_reader(reader, lambda: seen.append(reader.recv(1)))
            writer.send(b"abc")
            await until(lambda: len(seen) == 3)
            loop.remove_reader(reader)

    with asyncio.Runner(loop_factory=CalmLoop) as runner:
        runner.run(run())
    assert seen == [b"a", b"b", b"c"]


def test_the_reader_of_grpc_is_known() -> None:
    """It has a private name: another release of grpcio may change it, and nothing would be calm any more."""
    known: list[bool] = []

    class WatchedLoop(CalmLoop):
        @override
        def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
            known.append(is_completion_reader(callback))
            super().add_reader(fd, callback, *args)

    async def run() -> None:
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await server.stop(None)

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(run())
    assert any(known)


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="no counts per thread on this system")
def test_a_loop_that_never_sleeps_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    now = [100.0]
    waiting = threading.Event()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        waiting.wait(0.001)  # leaves the core, as a sleep would

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    num_pauses = [5]
    monkeypatch.setattr(calm_loop, "_num_pauses", lambda: num_pauses[0])
    breath = Breath()
    breath.take_if_due()
    assert not pauses, "it has not run for long"
    now[0] += 2 * calm_loop.BREATH_AFTER_S
    num_pauses[0] += 1
    breath.take_if_due()
    assert not pauses, "it has slept meanwhile"
    now[0] += 2 * calm_loop.BREATH_AFTER_S
    breath.take_if_due()
    assert len(pauses) == 1
    breath.take_if_due()
    assert len(pauses) == 1, "that was one"


def test_where_nobody_counts_pauses_a_loop_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    now = [100.0]
    monkeypatch.delattr(resource, "RUSAGE_THREAD", raising=False)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    breath = Breath()
    now[0] += 2 * calm_loop.BREATH_AFTER_S
    breath.take_if_due()
    assert not pauses


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="no counts per thread on this system")
def test_a_sleep_counts_as_a_pause_and_work_does_not() -> None:
    before = calm_loop._num_pauses()
    assert before is not None
    sum(range(1000))
    assert calm_loop._num_pauses() == before
    time.sleep(0.001)
    after = calm_loop._num_pauses()
    assert after is not None
    assert after > before
