"""`python -m stepahead.worker`: the composition root of the worker process.

Exit codes: 0 after SIGTERM or SIGINT, 1 if the model cannot be loaded or the address not bound, 2 for wrong
flags, 70 if the device thread or the host thread failed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click
import structlog
import uvloop

from stepahead.worker.announce import Announcer
from stepahead.worker.errors import ModelError
from stepahead.worker.logs import configure_logs
from stepahead.worker.server import WorkerServer
from stepahead.worker.settings import settings_from_options, settings_options

if TYPE_CHECKING:
    from stepahead.worker.runner import Runner
    from stepahead.worker.settings import WorkerSettings

EXIT_LOAD_FAILED = 1
EXIT_THREAD_FAILED = 70
SWITCH_INTERVAL_S = 0.0001
"""How long one thread may keep the interpreter from another. The default of 5 ms is longer than a step."""

log = structlog.stdlib.get_logger()


@click.command(context_settings={"auto_envvar_prefix": "STEPAHEAD", "show_default": True})
@settings_options
def main(**options: Any) -> None:  # noqa: ANN401 - click fills it, `settings_from_options` checks it
    """Serves a model's forward passes to a scheduler.

    Every option is also an environment variable, STEPAHEAD_ and its name in upper case.
    """
    settings = settings_from_options(options)
    configure_logs(settings.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exit_code, threads_ended = runner.run(_serve(settings))
    if not threads_ended:
        # A thread hangs in a device call: interpreter shutdown could wait for it or crash in it.
        logging.shutdown()
        os._exit(exit_code)
    sys.exit(exit_code)


async def _serve(settings: WorkerSettings) -> tuple[int, bool]:
    """Runs until a signal or a fault; the exit code, and whether all threads ended."""
    announcer = Announcer(settings.announce_fd)
    server = WorkerServer(settings, lambda: _make_runner(settings), announcer)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, _on_signal, signal_number, stop)
    stopped = loop.create_task(stop.wait())
    exit_code = 0
    try:
        await server.listen()
        loading = loop.create_task(server.load())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            loading.cancel()
        else:
            await loading
            _calm_collector()
            failed = loop.create_task(server.wait_failed())
            await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
            exit_code = EXIT_THREAD_FAILED if failed.done() else 0
            failed.cancel()
    except ModelError as error:
        announcer.failed(str(error))
        log.error("worker_failed_to_start", detail=str(error))
        exit_code = EXIT_LOAD_FAILED
    except Exception:
        announcer.failed("the model could not be loaded; see the worker's log")
        log.exception("worker_failed_to_start")
        exit_code = EXIT_LOAD_FAILED
    stopped.cancel()
    return exit_code, await server.close()


def _calm_collector() -> None:
    """Keeps collections short: weights and modules live for ever, garbage is seldom cyclic, the young are few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 50, 1_000)


def _on_signal(signal_number: signal.Signals, stop: asyncio.Event) -> None:
    log.info("worker_stopping", signal=signal_number.name)
    stop.set()


def _make_runner(settings: WorkerSettings) -> Runner:
    # Imported on the device thread: this is where torch comes in.
    from stepahead.worker.model.registry import make_runner  # noqa: PLC0415

    return make_runner(settings.model, dtype=settings.dtype, threads=settings.threads)


if __name__ == "__main__":
    main()
