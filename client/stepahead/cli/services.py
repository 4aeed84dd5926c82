"""`stepahead scheduler` and `stepahead worker`: become that service, arguments passed through."""

import os
import sys

import click

from stepahead.cli.local_services import require_extras

_PASS_THROUGH: dict[str, object] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


@click.command(context_settings=_PASS_THROUGH, short_help="Run a scheduler (its own options follow).")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scheduler(arguments: tuple[str, ...]) -> None:
    """Runs a scheduler; same as python -m stepahead.scheduler."""
    _become("scheduler", arguments)


@click.command(context_settings=_PASS_THROUGH, short_help="Run a worker (its own options follow).")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Runs a worker; same as python -m stepahead.worker."""
    _become("worker", arguments)


def _become(service: str, arguments: tuple[str, ...]) -> None:
    require_extras(service)
    # exec, not a child: signals and the exit code are then the service's own.
    os.execv(sys.executable, [sys.executable, "-m", f"stepahead.{service}", *arguments])
