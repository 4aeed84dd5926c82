"""What the `stepahead` script starts: imports next to nothing itself, so that Ctrl-C is quiet at once."""

import errno
import os
import signal
import sys
from collections.abc import Callable

from stepahead.cli.exit_codes import EXIT_FAILURE, EXIT_INTERRUPTED

# What writing runs into; a closed pipe ends quietly before it comes here.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Runs the command; an interrupt while its modules load ends it as any later one does."""
    # A KeyboardInterrupt in the middle of an import may be swallowed, or be printed and go on.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)

    def load_and_run() -> None:
        from stepahead.cli.main import main as command  # noqa: PLC0415 - what takes a moment

        signal.signal(signal.SIGINT, handler)
        command()

    run_quietly(load_and_run)


def _leave(*_: object) -> None:
    # Nothing has been done or printed yet.
    os._exit(EXIT_INTERRUPTED)


def run_quietly(command: Callable[[], object]) -> None:
    """Runs a command that may be interrupted, or fail to write its output, without a traceback."""
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        # An error that names a file is about opening it.
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"error: cannot write the output: {error.strerror}\n")
        sys.exit(EXIT_FAILURE)
