"""Operating errors of the worker.

WorkerError
|- ModelError       a model cannot be loaded; the message says what to do next
|  `- OptionRefused an option has a value that this model or machine does not allow
|- PlanInvalid      a plan does not describe a legal step (answered by StepRejected)
|- SessionRefused   a session cannot be opened or resumed
`- RankLost         a rank of this worker is gone: the process must end
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of the worker's operating errors."""


class ModelError(WorkerError):
    """A model cannot be loaded. The message is for a person and says what is supported."""


class OptionRefused(ModelError):
    """An option has a value that this model or this machine does not allow; the message begins with the option."""


class PlanInvalid(WorkerError):
    """A plan names something that does not exist or contradicts the worker's state.

    Attributes:
        violations: one line per fault, each naming the field.
    """

    def __init__(self, violations: list[str]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations


class SessionRefused(WorkerError):
    """A session cannot be opened or resumed.

    Attributes:
        reason: upper-case machine word, e.g. WORKER_OWNED.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RankLost(WorkerError):
    """A rank of a tensor-parallel worker is gone: no other rank can compute a step, every process must end."""
