"""Operating errors of the core. Programmer errors are assertions.

CoreError
|- RequestInfeasible   the request could never run, even alone; refuse it
|- QueueFull           too many requests are waiting; try again later
|- UnknownLane         no such lane (it was lost or never opened)
`- StepMismatch        a result does not belong to the oldest step in flight: close the lane's epoch
"""

from __future__ import annotations


class CoreError(Exception):
    """Base of the core's operating errors."""


class RequestInfeasible(CoreError):
    """The request could never run, even alone on an empty lane.

    Attributes:
        needed_tokens: cache positions the request may need.
        available_tokens: cache positions of the largest lane.
    """

    def __init__(self, needed_tokens: int, available_tokens: int) -> None:
        super().__init__(f"needs {needed_tokens} cache positions, the largest worker has {available_tokens}")
        self.needed_tokens = needed_tokens
        self.available_tokens = available_tokens


class QueueFull(CoreError):
    """Too many requests are waiting.

    Attributes:
        num_waiting: how many.
    """

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting")
        self.num_waiting = num_waiting


class UnknownLane(CoreError):
    """No such lane."""


class StepMismatch(CoreError):
    """A result does not belong to the oldest step in flight."""
