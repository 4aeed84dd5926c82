"""How the worker's commands end where their output cannot be written, or Ctrl-C comes before they serve."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable

_EXIT_FAILURE = 1
_EXIT_INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing runs into; a closed pipe click ends quietly itself."""


def run_quietly(command: Callable[[], object]) -> None:
    """Runs a command to its end, without a traceback where its output cannot be written: one line, and 1."""
    try:
        command()
    except OSError as error:
        # An error that names a file is about opening it.
        if error.errno not in _FULL or error.filename is not None:
            raise
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"error: cannot write the output: {error.strerror}\n")
        sys.exit(_EXIT_FAILURE)


def run_service(command: Callable[[], object]) -> None:
    """As `run_quietly`. Until the service heeds signals itself, Ctrl-C ends it at once: it owes nobody anything."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    run_quietly(command)


def _leave(*_: object) -> None:
    os._exit(_EXIT_INTERRUPTED)
