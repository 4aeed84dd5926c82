"""The device as an in-order stream of work with events, and the CPU's stand-in for one.

A stream executes submitted work first in, first out; an event recorded on it fires when everything submitted
before it has ended. On the CPU one thread for the life of the process plays the stream. It is also the only
thread that ever enters torch: libgomp keeps a team of threads per thread that opened a parallel region, and a
second team makes every later forward about a third slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Task = Callable[[], object]
ErrorHandler = Callable[[Exception], None]


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything submitted before the event has ended."""
        ...


class Stream(Protocol):
    """In-order work on a device."""

    def submit(self, task: Task) -> None:
        """Runs `task` behind everything submitted before. Any thread may call it; returns at once."""
        ...

    def record_event(self, notify: Task) -> Event:
        """An event behind everything submitted before; `notify` is called once when it fires."""
        ...


class CpuEvent:
    """An event of a `CpuStream`."""

    __slots__ = ("_fired",)

    def __init__(self) -> None:
        self._fired = False

    def query(self) -> bool:
        """Whether everything submitted before the event has ended."""
        return self._fired

    def fire(self) -> None:
        """Marks the event; called by the stream's thread."""
        self._fired = True


class CpuStream:
    """One thread that plays a device stream.

    A task that raises ends the stream: `on_error` is called once, on the stream's thread, and nothing submitted
    later runs, so that no event behind the fault fires and no result of a broken step is ever delivered.

    Args:
        on_error: told about the exception that ended the stream.
        name: of the thread.
    """

    def __init__(self, on_error: ErrorHandler, *, name: str = "stepahead-device") -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._on_error = on_error
        # A daemon: a device call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Runs `task` behind everything submitted before. Any thread may call it; returns at once."""
        self._tasks.put(task)

    def record_event(self, notify: Task) -> CpuEvent:
        """An event behind everything submitted before; `notify` is called on the stream's thread when it fires."""
        event = CpuEvent()

        def fire() -> None:
            event.fire()
            notify()

        self._tasks.put(fire)
        return event

    def close(self, timeout_s: float) -> bool:
        """Ends the thread behind everything submitted before.

        Returns:
            Whether it ended within `timeout_s` seconds.
        """
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            try:
                task()
            except Exception as error:  # noqa: BLE001 - whatever a model raises must be reported, never lost
                self._on_error(error)
                return
