"""The device as an in-order stream of work, and the CPU's stand-in for one.

A stream executes submitted work first in, first out, and tells when a piece of it and everything before it has
ended. On the CPU one thread for the life of the process plays the stream. It is also the only thread that ever
enters torch: libgomp keeps a team of threads per thread that opened a parallel region, and a second team makes
every later forward about a third slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Task = Callable[[], object]
ErrorHandler = Callable[[Exception], None]


class Stream(Protocol):
    """In-order work on a device."""

    def submit(self, task: Task, on_end: Task | None = None) -> None:
        """Runs `task` behind everything submitted before. Any thread may call it; returns at once.

        Args:
            task: the work.
            on_end: called once, on a thread of the stream's, when the work has ended. It must be short: on the
                CPU nothing else runs on the device meanwhile.
        """
        ...


class CpuStream:
    """One thread that plays a device stream.

    A task that raises ends the stream: `on_error` is called once, on the stream's thread, and nothing submitted
    later runs, so that no end behind the fault is told and no result of a broken step is ever delivered.

    Args:
        on_error: told about the exception that ended the stream.
        name: of the thread.
    """

    def __init__(self, on_error: ErrorHandler, *, name: str = "stepahead-device") -> None:
        self._work: SimpleQueue[tuple[Task, Task | None] | None] = SimpleQueue()
        self._on_error = on_error
        self._untold: Task | None = None  # an end that the work behind it will tell; stream's thread only
        self._puts_off_ends = False
        # A daemon: a device call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, task: Task, on_end: Task | None = None) -> None:
        """See `Stream.submit`."""
        self._work.put((task, on_end))

    def put_off_ends(self) -> Task:
        """From now on work that has a successor leaves the telling of its end to it. On the stream's thread.

        For work that only plays a device. A real one starts its next kernel by itself; here the same thread would
        first wake the host, some microseconds, and the played device would stand idle for as long.

        Returns:
            What every later work must call once, as soon as its device is busy.
        """
        self._puts_off_ends = True
        return self._tell_end

    def close(self, timeout_s: float) -> bool:
        """Ends the thread behind everything submitted before.

        Returns:
            Whether it ended within `timeout_s` seconds.
        """
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # Between two pieces of work the device is idle: as little as possible happens here.
        while (work := self._work.get()) is not None:
            task, on_end = work
            try:
                task()
                self._tell_end()  # work that plays no device has left it to us
                self._untold = on_end
                if not self._puts_off_ends or self._work.empty():
                    self._tell_end()
            except Exception as error:  # noqa: BLE001 - whatever a model raises must be reported, never lost
                self._tell_end()  # of the work before
                self._on_error(error)
                return
        self._tell_end()

    def _tell_end(self) -> None:
        if (on_end := self._untold) is not None:
            self._untold = None
            on_end()
