"""Life of the worker process: listen, load, serve, end."""

from __future__ import annotations

import asyncio
import importlib.metadata
import secrets
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stepahead.v1 import worker_pb2, worker_pb2_grpc
from stepahead.worker import commands, convert
from stepahead.worker.cache_sizing import (
    cache_bytes,
    describe_groups,
    num_concurrent,
    refuse_larger,
    size_cache,
    step_limits,
)
from stepahead.worker.device_stream import CpuStream
from stepahead.worker.errors import ModelError
from stepahead.worker.executor import Executor
from stepahead.worker.host_memory import available_memory_bytes, release_unused_memory
from stepahead.worker.launch_stream import LaunchStream
from stepahead.worker.launched_device import LaunchedDevice
from stepahead.worker.runner import LaunchingRunner, LeadsRanks, PlaysDevice
from stepahead.worker.service import LoadedWorker, WorkerServicer
from stepahead.worker.step_device import StepDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepahead.worker.announce import Announcer
    from stepahead.worker.device_stream import ErrorHandler
    from stepahead.worker.runner import CacheShape, ModelFacts, Runner
    from stepahead.worker.settings import WorkerSettings

_T = TypeVar("_T")

log = structlog.stdlib.get_logger()

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
MAX_MESSAGE_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 2.0

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # otherwise a second worker binds the same port and steals connections
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Schedulers ping every 20 s or so on silent streams; the default policy would answer GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that vanished without a word must not hold the worker for ever.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class WorkerServer:
    """One worker.

    Args:
        settings: of the process.
        make_runner: makes the model's runner; called on the device thread, like everything of the runner.
        announcer: told how start-up goes.
        open_stream: makes the device; a `LaunchStream` takes a `LaunchingRunner`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        make_runner: Callable[[], Runner],
        announcer: Announcer,
        open_stream: Callable[[ErrorHandler], CpuStream | LaunchStream] = CpuStream,
    ) -> None:
        self._settings = settings
        self._make_runner = make_runner
        self._open_stream = open_stream
        self._announcer = announcer
        self._servicer = WorkerServicer(settings.resume_grace_ns)
        health_module: Any = health  # its stubs leave the asyncio half out
        self._health: Any = health_module.aio.HealthServicer()
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        self._executor: Executor | None = None
        self._stream: CpuStream | LaunchStream | None = None
        self._runner: Runner | None = None
        self._failed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.address = ""

    async def listen(self) -> str:
        """Opens the listener; GetWorkerInfo answers UNAVAILABLE until `load` is done.

        Returns:
            HOST:PORT.

        Raises:
            ModelError: the address cannot be bound.
        """
        settings = self._settings
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)  # pyright: ignore[reportUnknownMemberType]
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if settings.is_loopback if settings.reflection is None else settings.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        wanted = f"{settings.host}:{settings.port}"
        try:
            port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            message = f"cannot listen on {wanted}: is the port in use, or the host not this machine's?"
            raise ModelError(message) from error
        await self._server.start()
        self.address = f"{settings.host}:{port}"
        self._announcer.listening(self.address)
        log.info("worker_listening", address=self.address)
        return self.address

    async def load(self) -> None:
        """Loads the model on the device thread and starts to accept sessions.

        Raises:
            ModelError: the model cannot be loaded or its cache does not fit.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        loaded: asyncio.Future[tuple[Runner, ModelFacts, CacheShape]] = loop.create_future()

        def device_failed(error: Exception) -> None:
            if self._executor is not None:
                self._executor.submit(commands.DeviceFailed(error))
            else:
                loop.call_soon_threadsafe(_fail, loaded, error)

        def load_model() -> None:
            runner = self._make_runner()
            if isinstance(runner, PlaysDevice) and isinstance(stream, CpuStream):
                runner.tell_ends_by(stream.put_off_ends())
            facts = runner.load(self._announcer.progress)
            release_unused_memory()  # the cache is sized by what is free
            shape = _cache_shape(settings, runner, facts)
            runner.allocate(shape)
            loop.call_soon_threadsafe(_succeed, loaded, (runner, facts, shape))

        self._stream = stream = self._open_stream(device_failed)
        stream.start()
        stream.submit(load_model)
        runner, facts, shape = await loaded
        self._runner = runner
        worker_instance_id = secrets.token_hex(8)
        self._executor = Executor(
            _make_device(settings, runner, stream),
            shape,
            vocab_size=facts.vocab_size,
            max_step_ns=settings.max_step_ns,
            resume_grace_ns=settings.resume_grace_ns,
            worker_instance_id=worker_instance_id,
            on_fatal=lambda: loop.call_soon_threadsafe(_succeed, self._failed, None),
        )
        self._executor.start()
        worker_info = convert.worker_info_message(
            facts,
            shape,
            worker_instance_id=worker_instance_id,
            max_overlap_depth=settings.max_overlap_depth,
            version=importlib.metadata.version("stepahead"),
        )
        self._servicer.serve(LoadedWorker(self._executor, worker_info, facts.tokenizer_bundle))
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._log_ready(facts, shape, worker_instance_id)
        self._announcer.ready(facts, shape, num_concurrent(shape, self._settings))

    async def wait_failed(self) -> None:
        """Returns when a thread of the worker has failed: the process must end."""
        await asyncio.shield(self._failed)

    def fail(self, error: Exception) -> None:
        """Something that the loaded model needs is gone: as if the device thread had failed."""
        assert self._executor is not None, "load comes first"
        self._executor.submit(commands.DeviceFailed(error))

    async def close(self) -> bool:
        """Takes no more plans, ends streams UNAVAILABLE, stops the threads.

        Returns:
            Whether every thread ended; a device call that hangs cannot be stopped.
        """
        self._servicer.shut_down()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(CLOSE_TIMEOUT_S)
        ended = True
        if self._executor is not None:
            ended = await asyncio.to_thread(self._executor.close, CLOSE_TIMEOUT_S)
        if self._stream is not None:
            if isinstance(self._runner, LeadsRanks):
                self._stream.submit(self._runner.end_ranks)
            ended = await asyncio.to_thread(self._stream.close, CLOSE_TIMEOUT_S) and ended
        log.info("worker_closed", threads_ended=ended)
        return ended

    async def _set_health(self, serving: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, serving)

    def _log_ready(self, facts: ModelFacts, shape: CacheShape, worker_instance_id: str) -> None:
        log.info(
            "worker_ready",
            address=self.address,
            worker_instance_id=worker_instance_id,
            model=facts.name,
            fingerprint=facts.fingerprint,
            device=facts.device,
            dtype=facts.dtype,
            weight_bytes=facts.weight_bytes,
            kv_cache_bytes=sum(cache_bytes(shape, facts)),
            kv_groups=describe_groups(shape),
            block_size=shape.block_size,
            max_model_len=shape.max_model_len,
            max_num_seqs=shape.max_num_seqs,
            num_slots=shape.num_slots,
            capacity=(
                f"maximum concurrency for {shape.max_model_len}-token requests: "
                f"{num_concurrent(shape, self._settings):.1f}"
            ),
        )


def _cache_shape(settings: WorkerSettings, runner: Runner, facts: ModelFacts) -> CacheShape:
    """A GPU's memory is the cache's, as far as it may be used; the host's is everybody's."""
    if not isinstance(runner, LaunchingRunner):
        available = facts.available_bytes
        if available is None:
            available = available_memory_bytes()
        shape = size_cache(settings, facts, available)
        refuse_larger(settings, shape, facts, available)
        return shape
    if settings.num_kv_blocks is not None or settings.kv_cache_bytes is not None:
        return size_cache(settings, facts, 0)
    left = runner.cache_bytes(step_limits(settings, facts), settings.gpu_memory_utilization)
    return size_cache(settings, facts, left, fill=True)


def _make_device(settings: WorkerSettings, runner: Runner, stream: CpuStream | LaunchStream) -> StepDevice:
    if isinstance(stream, CpuStream):
        return StepDevice(runner, stream, hold_events=settings.hold_events, single_step=settings.single_step)
    if not isinstance(runner, LaunchingRunner):
        message = f"{type(runner).__name__} launches nothing: it cannot run on {type(stream).__name__}"
        raise TypeError(message)
    return LaunchedDevice(runner, stream, hold_events=settings.hold_events, single_step=settings.single_step)


def _succeed(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
