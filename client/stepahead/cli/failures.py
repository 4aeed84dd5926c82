"""How the command ends when something fails: one line that says what, where and what to do, and an exit code.

0    done
1    anything not listed here
2    bad input: a wrong option, a refused field, an unknown model
3    nobody serves, or not now: worth another try
130  interrupted
"""

import signal
from collections.abc import Sequence

from stepahead.client import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    StepaheadError,
    UnavailableError,
)

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


class StackError(Exception):
    """The locally started services could not be started, or one of them ended by itself."""

    def __init__(self, message: str, *, log_lines: Sequence[str] = (), advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.log_lines = tuple(log_lines)
        self.advice = advice


class StackInterrupted(Exception):
    """The user asked the locally started services to stop. `killed` says that they asked twice."""

    def __init__(self, *, killed: bool) -> None:
        super().__init__("interrupted")
        self.killed = killed


def exit_code_of(error: StepaheadError) -> int:
    """The exit code for an error of the client."""
    if isinstance(error, InvalidRequestError | NotFoundError | AlreadyExistsError):
        return EXIT_BAD_INPUT
    if isinstance(error, UnavailableError | OverloadedError):
        return EXIT_UNAVAILABLE
    return EXIT_FAILURE


def describe(error: StepaheadError) -> str:
    """One line: status, field, text, hint."""
    status = error.code or type(error).__name__
    # A status text may hold several lines; the first says what happened.
    text = error.message.strip().splitlines()[0]
    field = error.violations[0].field if error.violations else ""
    # Most texts name their field already.
    where = "" if field in text else f" [{field}]"
    hint = _hint(error)
    return f"error: {status}{where}: {text}" + (f" ({hint})" if hint else "")


def _hint(error: StepaheadError) -> str:
    if error.retry_delay_s is not None:
        return f"try again in {error.retry_delay_s:g} s"
    if isinstance(error, UnavailableError):
        return "is a server running there? `stepahead up --model ...` starts one, --address names another"
    if isinstance(error, NotFoundError):
        return "`stepahead status` shows what is served"
    return ""


def describe_exit(return_code: int) -> str:
    """How a process ended, in words. Negative codes are signals, as in subprocess."""
    if return_code >= 0:
        return f"exited with code {return_code}"
    return f"was ended by {signal.Signals(-return_code).name}"
