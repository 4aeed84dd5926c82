"""The scheduler process: builds everything, serves, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stepahead.scheduler.calm_threads import starting_calm_threads
from stepahead.scheduler.cluster import Cluster
from stepahead.scheduler.drain import Drainer
from stepahead.scheduler.engine import Engine
from stepahead.scheduler.front_end import FrontEnd
from stepahead.scheduler.generation_service import GenerationService
from stepahead.scheduler.model_service import ModelService
from stepahead.scheduler.operations_service import OperationsService
from stepahead.scheduler.request_decoding import RequestDecoding
from stepahead.scheduler.settings import Settings
from stepahead.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc

log = structlog.get_logger("server")

SERVICES = [
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    generation_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["OperationsService"].full_name,
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not steal connections
    ("grpc.max_receive_message_length", 16 * 2**20),  # larger than any legal field, so that the field is named
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
READINESS_INTERVAL_S = 0.25
COLLECT_AFTER = 256
"""Requests after which an idle server looks for garbage."""
LOOPBACK_PREFIXES = ("127.", "localhost", "[::1]", "unix:")


class Server:
    """Everything of one scheduler process, on one event loop."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.engine = Engine(settings, loop)
        self.cluster = Cluster(self.engine, settings)
        self.front_end = FrontEnd(self.engine, self.cluster, settings)
        self.drainer = Drainer(self.front_end)
        self.address = ""
        health_module: Any = health  # its stubs leave the asyncio half out
        self._health: Any = health_module.aio.HealthServicer()
        with starting_calm_threads():
            self._grpc = grpc.aio.server(interceptors=[RequestDecoding()], options=SERVER_OPTIONS)
        self._announced_ready = False
        self._num_accepted_then = 0  # when garbage was looked for last
        self.cluster.on_worker_refused = self._announce_refused

    async def start(self) -> None:
        """Listens and starts dialling workers.

        Raises:
            OSError: the address cannot be bound.
        """
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(self.front_end), self._grpc)
        generation_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self.front_end), self._grpc)
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(
            OperationsService(self.front_end, self.drainer), self._grpc
        )
        health_pb2_grpc.add_HealthServicer_to_server(  # pyright: ignore[reportUnknownMemberType]
            self._health, self._grpc
        )
        await self._publish_health()
        listen = self.settings.listen
        wanted = self.settings.reflection
        if wanted if wanted is not None else listen.startswith(LOOPBACK_PREFIXES):
            names = [*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._grpc)
        try:
            port = self._grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from error
        if not port and not listen.startswith("unix:"):
            raise OSError(f"cannot listen on {listen}: the address is in use or not ours")
        host = listen.rsplit(":", 1)[0]
        self.address = listen if listen.startswith("unix:") else f"{host}:{port}"
        await self._grpc.start()
        self._announce({"event": "listening", "address": self.address})
        log.info("listening", address=self.address, workers=list(self.settings.workers))
        self.cluster.start()

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT, then drains and stops. A second one ends the drain.

        Returns:
            Requests that did not finish within the drain.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set():
                log.info("stopping at once")
                self.drainer.hurry()
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        watcher = asyncio.create_task(self._watch_readiness())
        await stop.wait()
        watcher.cancel()
        num_cut = await self.stop()
        if num_cut:
            told = (
                f"{num_cut} request(s) did not finish in time (--drain-timeout {self.settings.drain_timeout_s:g})"
            )
            log.warning("drain_cut_short", message=told)
            self._announce({"event": "failed", "message": told})
        return num_cut

    async def stop(self) -> int:
        """Health first, then drain, then the sessions, then the listener. Returns requests that did not finish."""
        self.front_end.draining = True
        await self._publish_health()
        num_cut = await self.drainer.stop(self.settings.drain_timeout_s)
        await self.cluster.stop()
        self.engine.close()
        await self._grpc.stop(grace=1.0)
        log.info("stopped")
        return num_cut

    # -------------------------------------------------------------------------------------------- health

    async def _watch_readiness(self) -> None:
        while True:
            await self._publish_health()
            self.collect_if_idle()
            if self.cluster.is_ready and not self._announced_ready:
                self._announced_ready = True
                _calm_collector()
                model = self.cluster.require_model()
                facts = {"has_chat_template": model.has_chat_template, "has_tokenizer": model.codec is not None}
                self._announce({"event": "ready", "model": model.name, "workers": len(self.engine.links), **facts})
                log.info("ready", model=model.name, num_workers=len(self.engine.links))
            await asyncio.sleep(READINESS_INTERVAL_S)

    def collect_if_idle(self) -> None:
        """Frees what is left of requests while nobody waits: what has survived two looks is not looked at soon."""
        book = self.engine.book
        if book.requests or book.totals["accepted"] - self._num_accepted_then < COLLECT_AFTER:
            return
        self._num_accepted_then = book.totals["accepted"]
        gc.collect()

    async def _publish_health(self) -> None:
        """Readiness is an answer through the step loop, not a live process (rule O4)."""
        ready = self.cluster.is_ready and not self.front_end.draining
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)

    def _announce_refused(self, address: str, reason: str) -> None:
        """Whoever waits for us to be ready may wait for ever; later, a log line is enough."""
        if not self._announced_ready:
            self._announce({"event": "refused", "worker": address, "message": reason})

    def _announce(self, event: dict[str, object]) -> None:
        """One JSON line for whoever started us (`stepahead up`)."""
        announce_fd = self.settings.announce_fd
        if announce_fd is not None:
            # A supervisor that is gone must not stop the server.
            with contextlib.suppress(OSError):
                os.write(announce_fd, (json.dumps(event) + "\n").encode())


def _calm_collector() -> None:
    """Keeps collections short: what exists now lives for ever, garbage is seldom cyclic, the young are few.

    A generation of 100,000 objects would take 10 to 20 ms to look through, several steps of a fast device. So the
    first look is at 1,000 objects, the second at 10,000 at most, and one at all of them follows a million: what
    gRPC leaves of 200,000 calls. Requests leave no cycles of ours.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 10, 100)


async def serve(settings: Settings) -> int:
    """Runs a scheduler until it is told to stop.

    Returns:
        Requests that did not finish within the drain.

    Raises:
        OSError: the address cannot be bound.
    """
    server = Server(settings, asyncio.get_running_loop())
    try:
        await server.start()
        return await server.run()
    finally:
        server.engine.close()  # whatever ended it: no line of the log stays unwritten
