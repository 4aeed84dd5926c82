"""`python -m stepahead.scheduler`: the composition root."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import click

from stepahead.scheduler.calm_loop import CalmLoop
from stepahead.scheduler.entry import run_service
from stepahead.scheduler.server import serve
from stepahead.scheduler.settings import from_options, options
from stepahead.scheduler.telemetry import configure_logs


@click.command(context_settings={"max_content_width": 100})
@options
def main(**values: object) -> None:
    """Serves a language model: owns requests, plans steps, streams them to workers."""
    settings = from_options(values)
    configure_logs(settings.log_format)
    try:
        with asyncio.Runner(loop_factory=CalmLoop) as runner:
            num_cut = runner.run(serve(settings))
    except OSError as error:
        # The system's own have a number: a full disk, for example.
        is_address = error.errno is None
        message = f"{error}; choose another --listen or stop the other server" if is_address else str(error)
        if settings.announce_fd is not None:
            line = json.dumps({"event": "failed", "message": message}) + "\n"
            os.write(settings.announce_fd, line.encode())
        click.echo(f"error: {message}", err=True)
        sys.exit(1)
    sys.exit(1 if num_cut else 0)


if __name__ == "__main__":
    run_service(main)
