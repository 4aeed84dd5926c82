"""`stepahead bench scheduler` and `stepahead bench traces`: become that measurement, arguments passed through."""

import os
import sys

import click

from stepahead.cli.local_services import require_extras

_PASS_THROUGH: dict[str, object] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


@click.command(context_settings=_PASS_THROUGH, short_help="What a step costs the scheduler core.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scheduler(arguments: tuple[str, ...]) -> None:
    """Times plan and commit; same as python -m stepahead.scheduler.bench scheduler."""
    _become("scheduler", arguments)


@click.command(context_settings=_PASS_THROUGH, short_help="Replay recorded request traces in virtual time.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def traces(arguments: tuple[str, ...]) -> None:
    """Replays request traces through the scheduler core; same as python -m stepahead.scheduler.bench traces."""
    _become("traces", arguments)


def _become(measurement: str, arguments: tuple[str, ...]) -> None:
    require_extras("scheduler")
    # exec, not a child: signals, output and the exit code are then the measurement's own.
    os.execv(sys.executable, [sys.executable, "-m", "stepahead.scheduler.bench", measurement, *arguments])
