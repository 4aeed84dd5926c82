"""The CPU's stand-in for a device stream."""

from __future__ import annotations

import threading

from stepahead.worker.device_stream import CpuStream


def test_work_is_in_order_on_one_thread_and_ends_are_told_behind_it() -> None:
    trace: list[str] = []
    threads: set[int] = set()
    stream = CpuStream(lambda error: trace.append(repr(error)))

    def task(name: str) -> None:
        trace.append(name)
        threads.add(threading.get_ident())

    stream.submit(lambda: task("a"), lambda: task("end of a"))
    stream.submit(lambda: task("b"))
    assert trace == []
    stream.start()
    assert stream.close(10)
    assert trace == ["a", "end of a", "b"]
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_an_end_is_not_told_before_the_work_in_front_of_it() -> None:
    go_on, at_work, ended = threading.Event(), threading.Event(), threading.Event()
    stream = CpuStream(lambda _: None)
    stream.start()
    stream.submit(at_work.set)
    stream.submit(lambda: go_on.wait(10), ended.set)
    assert at_work.wait(10)
    assert not ended.is_set()
    go_on.set()
    assert stream.close(10)
    assert ended.is_set()


def test_an_exception_ends_the_stream_and_is_told_once() -> None:
    """Nothing behind a fault runs, so no result of a broken step can be delivered."""
    errors: list[Exception] = []
    ran: list[str] = []

    def broken() -> None:
        raise ValueError("broken")

    stream = CpuStream(errors.append)
    stream.submit(broken, lambda: ran.append("end"))
    stream.submit(lambda: ran.append("later"))
    stream.start()
    assert stream.close(10)
    assert [str(error) for error in errors] == ["broken"]
    assert ran == []


def test_close_says_when_the_device_hangs() -> None:
    go_on = threading.Event()
    stream = CpuStream(lambda _: None)
    stream.start()
    stream.submit(lambda: go_on.wait(10))
    assert not stream.close(0.01)
    go_on.set()
    assert stream.close(10)


def test_an_end_that_is_put_off_is_told_by_the_work_behind_it() -> None:
    trace: list[str] = []
    stream = CpuStream(lambda error: trace.append(repr(error)))
    tell_end = stream.put_off_ends()

    def busy() -> None:
        trace.append("busy")
        tell_end()
        trace.append("done")

    stream.submit(lambda: trace.append("a"), lambda: trace.append("end of a"))
    stream.submit(busy, lambda: trace.append("end of busy"))
    stream.submit(lambda: trace.append("says nothing"), lambda: trace.append("last end"))
    stream.start()
    assert stream.close(10)
    assert trace == ["a", "busy", "end of a", "done", "says nothing", "end of busy", "last end"]


def test_an_end_that_is_put_off_is_told_when_nothing_is_behind_it_or_that_fails() -> None:
    errors: list[Exception] = []
    ended = threading.Event()
    told: list[str] = []
    stream = CpuStream(errors.append)
    stream.put_off_ends()
    stream.start()
    stream.submit(lambda: None, ended.set)
    assert ended.wait(10)  # nothing behind it

    def broken() -> None:
        raise ValueError("broken")

    go_on = threading.Event()
    stream.submit(lambda: go_on.wait(10), lambda: told.append("end before the fault"))
    stream.submit(broken, lambda: told.append("end of the fault"))
    go_on.set()
    assert stream.close(10)
    assert [str(error) for error in errors] == ["broken"]
    assert told == ["end before the fault"]
