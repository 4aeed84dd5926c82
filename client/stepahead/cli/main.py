"""The entry point: a table of subcommands, and what happens when one fails.

A new subcommand is one line in the table and one module; see status.py for a short one.
"""

import click
from rich.console import Console
from typing_extensions import override

from stepahead.cli.exit_codes import EXIT_INTERRUPTED
from stepahead.cli.failures import (
    StackError,
    StackInterrupted,
    describe,
    exit_code_of,
)
from stepahead.cli.lazy_group import LazyGroup
from stepahead.cli.options import CONTEXT_SETTINGS
from stepahead.cli.stack_view import show_stack_error
from stepahead.client import StepaheadError


class RootGroup(LazyGroup):
    """The subcommands, and the one place where their failures become a line on stderr and an exit code."""

    table = {  # noqa: RUF012 - declared a class variable by LazyGroup
        "up": "stepahead.cli.up:up",
        "generate": "stepahead.cli.generate:generate",
        "chat": "stepahead.cli.chat:chat",
        "status": "stepahead.cli.status:status",
        "health": "stepahead.cli.health:health",
        "lab": "stepahead.cli.lab:lab",
        "bench": "stepahead.cli.bench:bench",
        "scheduler": "stepahead.cli.services:scheduler",
        "worker": "stepahead.cli.services:worker",
        "demo": "stepahead.cli.demo:demo",
    }

    @override
    def invoke(self, ctx: click.Context) -> object:
        """Runs a subcommand; failures.py lists the exit codes."""
        try:
            return super().invoke(ctx)
        except StepaheadError as error:
            click.echo(describe(error), err=True)
            ctx.exit(exit_code_of(error))
        except StackError as error:
            show_stack_error(Console(stderr=True), error)
            ctx.exit(error.exit_code)
        except StackInterrupted as interrupted:
            ctx.exit(interrupted.exit_code)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=RootGroup, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="stepahead")
def main() -> None:
    """Serve language models, and talk to them.

    Every option is also an environment variable: --max-tokens is STEPAHEAD_MAX_TOKENS.

    Exit codes: 0 done; 1 it failed, stderr says what and what to do next; 2 the input or an option was refused;
    3 a service takes no work (health); 130, 143, 129 ended by Ctrl-C, SIGTERM, SIGHUP.
    """
