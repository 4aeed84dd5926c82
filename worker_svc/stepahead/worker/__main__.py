"""`python -m stepahead.worker`: the composition root of the worker process.

Exit codes: 0 after SIGTERM or SIGINT, 1 if the model cannot be loaded or the address not bound, 2 for flags that
are wrong, or wrong for this model or machine, 70 if the device thread or the host thread failed or a rank was lost.

With --tensor-parallel-size N this is rank 0 and starts the others, or the rank that RANK names (`ranks.place`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click
import structlog
import uvloop

from stepahead.worker.announce import Announcer
from stepahead.worker.descendants import kill_descendants
from stepahead.worker.device_stream import CpuStream
from stepahead.worker.entry import run_service
from stepahead.worker.errors import ModelError, OptionRefused, RankLost
from stepahead.worker.host_memory import available_memory_bytes
from stepahead.worker.launch_stream import LaunchStream
from stepahead.worker.logs import configure_logs
from stepahead.worker.ranks.followers import Followers
from stepahead.worker.ranks.lifeline import follow_to_the_end
from stepahead.worker.ranks.place import place_from_environment
from stepahead.worker.server import WorkerServer
from stepahead.worker.settings import MAX_THREADS, settings_from_options, settings_options

if TYPE_CHECKING:
    from stepahead.worker.device_stream import ErrorHandler
    from stepahead.worker.launch_stream import DevicePoint
    from stepahead.worker.ranks.place import RankPlace
    from stepahead.worker.runner import Runner
    from stepahead.worker.settings import WorkerSettings

EXIT_LOAD_FAILED = 1
EXIT_REFUSED = 2
EXIT_THREAD_FAILED = 70
LAST_WORDS_S = 2.0
"""How long the end of another rank waits for this one to say why."""
SWITCH_INTERVAL_S = 0.0001
"""How long one thread may keep the interpreter from another. The default of 5 ms is longer than a step."""

log = structlog.stdlib.get_logger()


@click.command(context_settings={"auto_envvar_prefix": "STEPAHEAD", "show_default": True})
@settings_options
def main(**options: Any) -> None:  # noqa: ANN401 - click fills it, `settings_from_options` checks it
    """Serves a model's forward passes to a scheduler.

    Every option is also an environment variable, STEPAHEAD_ and its name in upper case.
    """
    announce_fd: int | None = options["announce_fd"]
    try:
        settings = settings_from_options(options)
        _refuse_impossible_cache(settings)
    except click.UsageError as error:
        Announcer(announce_fd).failed(error.format_message())
        raise
    configure_logs(settings.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    place = _place(settings)
    try:
        _refuse_undivided(settings, place)
    except ModelError as error:
        Announcer(announce_fd).failed(str(error))
        log.error("worker_failed_to_start", detail=str(error))
        sys.exit(_exit_code_of(error))
    if place is not None and place.rank > 0:
        sys.exit(_follow(settings, place))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exit_code, threads_ended = runner.run(_serve(settings, place))
    if not threads_ended:
        # A thread hangs in a device call: interpreter shutdown could wait for it or crash in it.
        logging.shutdown()
        os._exit(exit_code)
    sys.exit(exit_code)


def _refuse_impossible_cache(settings: WorkerSettings) -> None:
    """Before a model is loaded: a cache that does not fit without one. Raises `click.UsageError`."""
    available_bytes = available_memory_bytes()
    if settings.device == "cpu" and (settings.kv_cache_bytes or 0) > available_bytes:
        raise click.UsageError(
            f"--kv-cache-bytes: the KV cache needs {settings.kv_cache_bytes} bytes, and {available_bytes} bytes of "
            f"memory are available"
        )


def _place(settings: WorkerSettings) -> RankPlace | None:
    """Which rank this process is told to be; None: it is the only one, or it starts the others."""
    if settings.tensor_parallel_size == 1:
        return None
    try:
        return place_from_environment(settings.tensor_parallel_size, os.environ)
    except ModelError as error:
        raise click.UsageError(str(error)) from error


def _refuse_undivided(settings: WorkerSettings, place: RankPlace | None) -> None:
    """Before any rank starts, which takes seconds: a model that so many cannot share. Raises `ModelError`."""
    if settings.tensor_parallel_size == 1 or (place is not None and place.lifeline_fd is not None):
        return  # whoever holds a lifeline was started by a rank that has looked
    from stepahead.worker.model.early_config import early_config  # noqa: PLC0415 - not every worker needs it
    from stepahead.worker.ranks.split import shard_config  # noqa: PLC0415

    config = early_config(settings.model)
    if config is not None:
        shard_config(config, settings.tensor_parallel_size)


def _exit_code_of(error: ModelError | RankLost) -> int:
    return EXIT_REFUSED if isinstance(error, OptionRefused) else EXIT_LOAD_FAILED


def _follow(settings: WorkerSettings, place: RankPlace) -> int:
    """Runs as a rank other than 0; the exit code."""
    if place.lifeline_fd is not None:
        follow_to_the_end(place.lifeline_fd)
    # Ctrl-C in a terminal reaches every rank; rank 0 ends them in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _run_shard(settings, place)
    except ModelError as error:
        log.error("rank_failed_to_start", rank=place.rank, detail=str(error))
        return EXIT_LOAD_FAILED
    except RankLost as error:
        log.error("rank_lost", rank=place.rank, detail=str(error))
    except Exception:
        log.exception("rank_failed", rank=place.rank)
    else:
        return 0
    # A sum that never ends may hold the device: interpreter shutdown could wait for it.
    logging.shutdown()
    os._exit(EXIT_THREAD_FAILED)


def _run_shard(settings: WorkerSettings, place: RankPlace) -> None:
    """Computes one rank's part until rank 0 ends the worker. Raises `ModelError`, `RankLost`."""
    # This is where torch comes in.
    import torch  # noqa: PLC0415

    from stepahead.worker.model.registry import cuda_options, open_gpu  # noqa: PLC0415
    from stepahead.worker.ranks.cuda_shard import load_cuda_shard  # noqa: PLC0415
    from stepahead.worker.ranks.follower import run_follower  # noqa: PLC0415
    from stepahead.worker.ranks.host_shard import load_host_shard  # noqa: PLC0415
    from stepahead.worker.ranks.rank_group import connect  # noqa: PLC0415

    spec, dtype = settings.model, settings.dtype
    if settings.device == "cpu":
        threads = settings.threads or _cores_of(place)
        group = connect(place, torch.device("cpu"))
        run_follower(group, lambda group: load_host_shard(spec, dtype, threads, place, group))
        return
    options = cuda_options(graphs=settings.cuda_graphs, deterministic=settings.deterministic)
    backend = open_gpu(settings.device, place)
    group = connect(place, backend.device, ordered_sums=options.deterministic)
    run_follower(group, lambda group: load_cuda_shard(spec, dtype, backend, options, place, group))


async def _serve(settings: WorkerSettings, place: RankPlace | None) -> tuple[int, bool]:
    """Runs until a signal or a fault; the exit code, and whether all threads ended."""
    others = Followers(settings.tensor_parallel_size, _rank_arguments(settings))
    try:
        if settings.tensor_parallel_size > 1 and place is None:
            place = await others.start()  # before gRPC has threads: it complains about forks
        return await _serve_scheduler(settings, place, others)
    finally:
        await others.close()


async def _serve_scheduler(
    settings: WorkerSettings, place: RankPlace | None, others: Followers
) -> tuple[int, bool]:
    """Runs as rank 0, or the only one, until a signal or a fault; as `_serve`."""
    announcer = Announcer(settings.announce_fd)
    server = WorkerServer(
        settings,
        lambda: _make_runner(settings, place),
        announcer,
        lambda on_error: _open_stream(settings, place, on_error),
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, _on_signal, signal_number, stop)
    stopped = loop.create_task(stop.wait())
    lost = loop.create_task(others.wait_lost())
    exit_code = 0
    try:
        await server.listen()
        if not await _load(server, stopped, lost):
            _abandon_load()
        _calm_collector()
        exit_code = await _run(server, stopped, lost)
    except (ModelError, RankLost) as error:
        announcer.failed(str(error))
        log.error("worker_failed_to_start", detail=str(error))
        exit_code = _exit_code_of(error)
    except Exception:
        announcer.failed("the model could not be loaded; see the worker's log")
        log.exception("worker_failed_to_start")
        exit_code = EXIT_LOAD_FAILED
    stopped.cancel()
    lost.cancel()
    return exit_code, await server.close()


async def _load(server: WorkerServer, stopped: asyncio.Task[bool], lost: asyncio.Task[str]) -> bool:
    """Loads the model; whether it did before a signal came.

    Raises:
        ModelError: it cannot be loaded, or a rank ended meanwhile.
    """
    loading = asyncio.create_task(server.load())
    await asyncio.wait({loading, stopped, lost}, return_when=asyncio.FIRST_COMPLETED)
    if lost.done() and not stopped.done():
        # A rank that could not load has told rank 0 why before it ended: that explains more.
        await asyncio.wait({loading, stopped}, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done() or isinstance(loading.exception(), RankLost):
            loading.cancel()
            raise ModelError(f"{lost.result()} while the model was loading; see the log above")
    if not loading.done():
        loading.cancel()
        return False
    await loading
    return True


def _abandon_load() -> NoReturn:
    """Ends the process with 0, now: nothing was promised to anybody, and a load cannot be told to stop.

    What it has started ends too: other ranks, the process that reads the tokenizer, compilers.
    """
    kill_descendants()
    log.info("worker_closed", loaded=False)
    logging.shutdown()
    os._exit(0)


async def _run(server: WorkerServer, stopped: asyncio.Task[bool], lost: asyncio.Task[str]) -> int:
    """Serves until a signal or a fault; the exit code."""
    failed = asyncio.create_task(server.wait_failed())
    await asyncio.wait({failed, stopped, lost}, return_when=asyncio.FIRST_COMPLETED)
    if lost.done() and not stopped.done():
        log.error("rank_lost", detail=lost.result())
        server.fail(RankLost(lost.result()))
        await failed
    failed.cancel()
    return EXIT_THREAD_FAILED if failed.done() else 0


def _calm_collector() -> None:
    """Keeps collections short: weights and modules live for ever, garbage is seldom cyclic, the young are few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 50, 1_000)


def _on_signal(signal_number: signal.Signals, stop: asyncio.Event) -> None:
    log.info("worker_stopping", signal=signal_number.name)
    stop.set()


def _rank_arguments(settings: WorkerSettings) -> list[str]:
    """What the other ranks are started with: what decides how they compute, and how they log."""
    flags = {
        "--model": settings.model,
        "--dtype": settings.dtype,
        "--device": settings.device,
        "--cuda-graphs": "on" if settings.cuda_graphs else "off",
        "--tensor-parallel-size": settings.tensor_parallel_size,
        "--log-format": settings.log_format,
        "--threads": settings.threads,
    }
    arguments = [part for name, value in flags.items() if value is not None for part in (name, str(value))]
    return [*arguments, "--deterministic"] if settings.deterministic else arguments


def _cores_of(place: RankPlace) -> int:
    """This rank's share of the machine's cores."""
    return min(max(len(os.sched_getaffinity(0)) // place.local_size, 1), MAX_THREADS)


def _make_runner(settings: WorkerSettings, place: RankPlace | None) -> Runner:
    # Imported on the device thread: this is where torch comes in.
    from stepahead.worker.model.registry import make_cuda_runner, make_runner  # noqa: PLC0415

    if settings.device == "cpu":
        threads = settings.threads if place is None else settings.threads or _cores_of(place)
        return make_runner(
            settings.model,
            dtype=settings.dtype,
            threads=threads,
            pin_threads=settings.pin_threads,
            place=place,
            max_model_len=settings.max_model_len,
        )
    return make_cuda_runner(
        settings.model,
        settings.device,
        dtype=settings.dtype,
        graphs=settings.cuda_graphs,
        deterministic=settings.deterministic,
        place=place,
        max_model_len=settings.max_model_len,
    )


def _open_stream(
    settings: WorkerSettings, place: RankPlace | None, on_error: ErrorHandler
) -> CpuStream | LaunchStream:
    if settings.device == "cpu":
        return CpuStream(on_error)

    def mark() -> DevicePoint:
        from stepahead.worker.model.registry import open_gpu  # noqa: PLC0415 - on the device thread

        return open_gpu(settings.device, place).record_event()

    return LaunchStream(mark, on_error)


if __name__ == "__main__":
    run_service(main)
