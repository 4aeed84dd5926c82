"""A click group whose subcommands live in modules of their own, loaded when they are needed."""

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click
from typing_extensions import override


class LazyGroup(click.Group):
    """Subclasses list their subcommands in `table`, as name to "module:attribute"."""

    table: ClassVar[Mapping[str, str]] = {}

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = self.table.get(cmd_name)
        if target is None:
            return None
        module_name, _, attribute = target.partition(":")
        command = getattr(importlib.import_module(module_name), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target} is no command")
        return command
