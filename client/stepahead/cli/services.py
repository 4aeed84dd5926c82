"""`stepahead scheduler` and `stepahead worker`: become that service, arguments passed through."""

import os
import sys
from collections.abc import Sequence

import click

from stepahead.cli.local_services import require_extras

_ENTRY = "stepahead.cli.module_entry"

PASS_THROUGH: dict[str, object] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}
"""Of a command that leaves its arguments, --help included, to what it becomes."""


@click.command(context_settings=PASS_THROUGH, short_help="Run a scheduler (its own options follow).")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scheduler(arguments: tuple[str, ...]) -> None:
    """Runs a scheduler; same as python -m stepahead.scheduler."""
    become("scheduler", "stepahead.scheduler", arguments)


@click.command(context_settings=PASS_THROUGH, short_help="Run a worker (its own options follow).")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Runs a worker; same as python -m stepahead.worker."""
    become("worker", "stepahead.worker", arguments)


def become(extra: str, module: str, arguments: Sequence[str]) -> None:
    """Turns this process into `python -m module arguments`, whose own extra must be installed."""
    require_extras(extra)
    # exec, not a child: signals, output and the exit code are then the module's own.
    os.execv(sys.executable, [sys.executable, "-m", _ENTRY, module, *arguments])
