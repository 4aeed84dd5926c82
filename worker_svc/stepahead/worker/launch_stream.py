"""A device that works by itself: one thread launches work, another waits for the device and tells what it reached.

    launching thread   launch N .......... launch N+1 ....          returns at once, however long the device takes
    device             ......N.............N+1...............
    telling thread             N began       N ended, N+1 began    in order, at the device's pace

Neither waits for the other, so the device always has the next step before it ends the current one. A fault of
either thread ends both in order: what the device reached before is told, nothing behind it is.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepahead.worker.device_stream import ErrorHandler, Task

    Told = Callable[["Instant"], object]


class DevicePoint(Protocol):
    """A point in a device's stream; `stepahead.kernels.cuda.backend.Event` is one."""

    def synchronize(self) -> None:
        """Waits until the device has reached it; other threads run meanwhile. Raises what the device raised."""
        ...

    def ns_since(self, earlier: Any) -> int:  # noqa: ANN401 - a point of the same device: its own class knows which
        """Nanoseconds by the device's clock since an earlier point; both were reached."""
        ...


@dataclass(frozen=True, slots=True)
class Instant:
    """The moment the device reached a point."""

    at_ns: int
    """By this process's monotonic clock, when it was noticed: some microseconds later."""
    since_last_ns: int
    """Device time since the point that was told last; 0 for the first one."""
    work_follows: bool
    """Whether the device had been given work behind this point by then."""


@dataclass(frozen=True, slots=True)
class _Marked:
    """A point on its way to the telling thread."""

    point: DevicePoint
    number: int  # counts up by 1
    told: Told


class LaunchStream:
    """Implements `Stream` for work that is launched.

    Args:
        mark: records a point behind everything launched by the calling thread. Called on the launching thread only.
        on_error: told, on the telling thread, about the exception that ended the stream.
        name: of the launching thread.
    """

    def __init__(
        self, mark: Callable[[], DevicePoint], on_error: ErrorHandler, *, name: str = "stepahead-device"
    ) -> None:
        self._mark = mark
        self._on_error = on_error
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._marked: SimpleQueue[_Marked | Exception | None] = SimpleQueue()
        self._num_marked = 0  # launching thread writes, telling thread reads
        # Daemons: a device call that never returns must not keep the process from ending.
        self._threads = (
            threading.Thread(target=self._launch_all, name=name, daemon=True),
            threading.Thread(target=self._tell_all, name=f"{name}-told", daemon=True),
        )

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task, on_end: Task | None = None) -> None:
        """See `Stream.submit`; the task launches work, or is host work that others must not overtake."""

        def work() -> None:
            task()
            if on_end is not None:
                end = on_end
                self._tell_here(lambda _: end())

        self._work.put(work)

    def launch(self, task: Task, *, on_begin: Told, on_end: Told) -> None:
        """Launches work behind everything submitted before; both are told when the device gets there."""

        def work() -> None:
            self._tell_here(on_begin)
            task()
            self._tell_here(on_end)

        self._work.put(work)

    def close(self, timeout_s: float) -> bool:
        """Ends the threads behind everything submitted before.

        Returns:
            Whether they ended within `timeout_s` seconds.
        """
        self._work.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _tell_here(self, told: Told) -> None:
        point = self._mark()
        self._num_marked += 1
        self._marked.put(_Marked(point, self._num_marked, told))

    def _launch_all(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever a model raises must be reported, never lost
                self._marked.put(error)
                return
        self._marked.put(None)

    def _tell_all(self) -> None:
        last: DevicePoint | None = None
        try:
            while (marked := self._marked.get()) is not None:
                if isinstance(marked, Exception):
                    self._on_error(marked)
                    return
                marked.point.synchronize()
                now = time.monotonic_ns()
                follows = self._num_marked > marked.number
                since = 0 if last is None else marked.point.ns_since(last)
                last = marked.point
                marked.told(Instant(now, since, follows))
        except Exception as error:  # noqa: BLE001 - a fault of the device shows where somebody waits for it
            self._on_error(error)
