"""The CPU's stand-in for a device stream."""

from __future__ import annotations

import threading

from stepahead.worker.device_stream import CpuStream


def test_work_is_in_order_on_one_thread_and_events_fire_behind_it() -> None:
    trace: list[str] = []
    threads: set[int] = set()
    stream = CpuStream(lambda error: trace.append(repr(error)))

    def task(name: str) -> None:
        trace.append(name)
        threads.add(threading.get_ident())

    stream.submit(lambda: task("a"))
    event = stream.record_event(lambda: task("event"))
    stream.submit(lambda: task("b"))
    assert not event.query()
    stream.start()
    assert stream.close(10)
    assert trace == ["a", "event", "b"]
    assert event.query()
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_an_event_does_not_fire_before_the_work_in_front_of_it() -> None:
    go_on, at_work = threading.Event(), threading.Event()
    stream = CpuStream(lambda _: None)
    stream.start()
    stream.submit(at_work.set)
    stream.submit(lambda: go_on.wait(10))
    event = stream.record_event(lambda: None)
    assert at_work.wait(10)
    assert not event.query()
    go_on.set()
    assert stream.close(10)
    assert event.query()


def test_an_exception_ends_the_stream_and_is_told_once() -> None:
    """Nothing behind a fault runs, so no result of a broken step can be delivered."""
    errors: list[Exception] = []
    ran: list[str] = []

    def broken() -> None:
        raise ValueError("broken")

    stream = CpuStream(errors.append)
    stream.submit(broken)
    event = stream.record_event(lambda: ran.append("event"))
    stream.submit(lambda: ran.append("later"))
    stream.start()
    assert stream.close(10)
    assert [str(error) for error in errors] == ["broken"]
    assert ran == []
    assert not event.query()


def test_close_says_when_the_device_hangs() -> None:
    go_on = threading.Event()
    stream = CpuStream(lambda _: None)
    stream.start()
    stream.submit(lambda: go_on.wait(10))
    assert not stream.close(0.01)
    go_on.set()
    assert stream.close(10)
