"""The stack of an experiment inside the test's process, from the very flags its command would start it with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import click

from stepahead.cli.stack import StackOptions, scheduler_arguments, worker_arguments
from stepahead.scheduler import settings as scheduler_settings
from stepahead.worker import settings as worker_settings
from stepahead.worker.announce import Announcer
from stepahead.worker.model.registry import make_runner
from stepahead.worker.runner import Runner
from stepahead.worker.server import WorkerServer
from tests.e2e.stack import Stack, eventually, serve_scheduler


def _parsed(decorate: Callable[..., Any], arguments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @click.command()
    @decorate
    def command(**values: Any) -> None:
        found.update(values)

    command.main(arguments, standalone_mode=False)
    return found


def unchanged(runner: Runner) -> Runner:
    return runner


@asynccontextmanager
async def serve_lab(options: StackOptions, change: Callable[[Runner], Runner] = unchanged) -> AsyncIterator[Stack]:
    """A ready scheduler and its worker; `change` may wrap the worker's runner."""
    flags = _parsed(worker_settings.settings_options, worker_arguments(options, 1))
    worker = WorkerServer(
        worker_settings.settings_from_options(flags), lambda: change(make_runner(options.model)), Announcer(None)
    )
    await worker.listen()
    try:
        await worker.load()
        flags = _parsed(scheduler_settings.options, scheduler_arguments(options, [worker.address]))
        settings = scheduler_settings.from_options(flags)
        fields = {name: getattr(settings, name) for name in settings.__slots__ if name != "workers"}
        async with serve_scheduler(*settings.workers, **fields) as stack:
            await eventually(lambda: bool(stack.server.engine.links))
            yield stack
    finally:
        await worker.close()
