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
