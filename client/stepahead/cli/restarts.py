"""When a service that ended by itself is started again. Pure: the caller reads the clock; times are seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """At most `most` restarts in a row, the delay before each doubling from `first_delay_s` on.

    The row ends once the service has served for `steady_s`: what loads slowly and dies at once is bounded too.
    """

    most: int = 5
    steady_s: float = 60.0
    first_delay_s: float = 0.5
    most_delay_s: float = 8.0


class Restarts:
    """The restarts of one service."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.num_in_row = 0

    def delay_after(self, served_s: float) -> float | None:
        """How long to wait before the next start, after a death `served_s` after it was ready.

        Counts the start; None: there is none any more.
        """
        policy = self.policy
        if served_s >= policy.steady_s:
            self.num_in_row = 0
        if self.num_in_row == policy.most:
            return None
        self.num_in_row += 1
        return min(policy.first_delay_s * 2 ** (self.num_in_row - 1), policy.most_delay_s)
