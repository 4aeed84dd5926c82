"""Waiting for a server to take requests: the part without I/O."""

from stepahead.client.errors import DeadlineError, StepaheadError
from stepahead.client.status import SchedulerState, ServerStatus

POLL_INTERVAL_S = 0.1


class Readiness:
    """Judges polled answers against a deadline and remembers the newest obstacle. Times are in seconds."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = now_s + timeout_s
        self._obstacle = "no answer"

    def is_serving(self, status: ServerStatus) -> bool:
        """Whether the scheduler takes requests."""
        self._obstacle = f"the scheduler is {status.state.value.replace('_', ' ')}"
        return status.state is SchedulerState.SERVING

    def note(self, error: StepaheadError) -> None:
        """Takes note of a failed poll."""
        self._obstacle = error.message

    def refuse_if_late(self, now_s: float) -> None:
        """Raises DeadlineError, naming the obstacle, once the time is over."""
        if now_s >= self._deadline_s:
            raise DeadlineError(f"not ready after {self._timeout_s:g} s: {self._obstacle}")
