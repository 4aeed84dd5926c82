"""What the `stepahead` script starts: imports next to nothing itself, so that Ctrl-C is quiet at once."""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Runs the command; an interrupt while its modules load ends it as any later one does."""
    try:
        from stepahead.cli.main import main as command  # noqa: PLC0415 - what takes a moment

        command()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
