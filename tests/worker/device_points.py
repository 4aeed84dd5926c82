"""A device that moves only when told to, for streams of launched work: its points and its clock."""

from __future__ import annotations

import threading


class HandPoint:
    """A point that is reached when the test says so, at a time by the device's clock."""

    def __init__(self) -> None:
        self.at_ns = 0
        self.error: Exception | None = None
        self._reached = threading.Event()

    def reach(self, at_ns: int = 0) -> None:
        self.at_ns = at_ns
        self._reached.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._reached.set()

    def synchronize(self) -> None:
        assert self._reached.wait(10)
        if self.error is not None:
            raise self.error

    def ns_since(self, earlier: HandPoint) -> int:
        return self.at_ns - earlier.at_ns


class HandDevice:
    """Marks points; `points` are those marked so far, in order."""

    def __init__(self) -> None:
        self.points: list[HandPoint] = []
        self._changed = threading.Condition()

    def mark(self) -> HandPoint:
        with self._changed:
            self.points.append(HandPoint())
            self._changed.notify_all()
            return self.points[-1]

    def wait_marked(self, count: int) -> None:
        """Blocks until so many points were marked."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.points) >= count, timeout=10)
