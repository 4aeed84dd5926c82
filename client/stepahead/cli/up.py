"""`stepahead up`: one command that serves a model on this machine."""

import asyncio
from pathlib import Path
from typing import Unpack

import click
from rich.console import Console

from stepahead.cli.failures import StackInterrupted
from stepahead.cli.local_services import kept_log_dir, require_extras, require_free_port
from stepahead.cli.options import CONTEXT_SETTINGS, ListenAddress, StackArguments, stack_options
from stepahead.cli.restarts import RestartPolicy
from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView, show_banner


@click.command(context_settings=CONTEXT_SETTINGS)
@stack_options()
@click.option(
    "--listen", type=ListenAddress(), default="127.0.0.1:50051", help="Where clients connect; port 0: any free one."
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for logs [default: a temporary one, removed after a clean stop].",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the services' logs on stderr.")
def up(listen: str, log_dir: Path | None, *, verbose: bool, **arguments: Unpack[StackArguments]) -> None:
    """Serve a model: start a scheduler and its workers on this machine.

    A worker that ends by itself is started again, up to 5 times in a row; accepted requests wait for it meanwhile.

    Ctrl-C stops them in order: accepted requests finish, then everything ends. A second Ctrl-C ends the requests
    at once. Exit code 0 after requests have finished in order, 130 (SIGTERM: 143) if it was interrupted before it
    served.
    """
    require_extras("scheduler", "worker")
    require_free_port(listen)
    options = StackOptions(listen=listen, **arguments)
    with kept_log_dir(log_dir, verbose=verbose) as logs:
        try:
            asyncio.run(_serve(options, logs))
        except StackInterrupted as interrupted:
            # Ctrl-C is how a server ends; before it serves, and in a hurry, it is an interrupt.
            if not interrupted.served:
                where = "" if logs is None else f"; logs are in {logs}"
                click.echo(f"interrupted before it served{where}", err=True)
            if interrupted.killed or not interrupted.served:
                raise


async def _serve(options: StackOptions, log_dir: Path | None) -> None:
    with ConsoleView(Console(stderr=True)) as view:

        async def wait_for_stop(ready: StackReady) -> None:
            view.serving()
            show_banner(ready, options, log_dir)
            await asyncio.Event().wait()

        stack = Stack(options, view, log_dir=log_dir, restart=RestartPolicy())
        await run_stack(stack, wait_for_stop, ends_process=True)
