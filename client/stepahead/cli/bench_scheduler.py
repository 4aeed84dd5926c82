"""`stepahead bench scheduler` and `stepahead bench traces`: become that measurement, arguments passed through."""

import click

from stepahead.cli.services import PASS_THROUGH, become

_MODULE = "stepahead.scheduler.bench"


@click.command(context_settings=PASS_THROUGH, short_help="What a step costs the scheduler core.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scheduler(arguments: tuple[str, ...]) -> None:
    """Times plan and commit; same as python -m stepahead.scheduler.bench scheduler."""
    become("scheduler", _MODULE, ("scheduler", *arguments))


@click.command(context_settings=PASS_THROUGH, short_help="Replay recorded request traces in virtual time.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def traces(arguments: tuple[str, ...]) -> None:
    """Replays request traces through the scheduler core; same as python -m stepahead.scheduler.bench traces."""
    become("scheduler", _MODULE, ("traces", *arguments))
