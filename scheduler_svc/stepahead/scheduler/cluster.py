"""The workers of this scheduler: their links, and the one model they must agree on."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from functools import partial

import structlog

from stepahead.scheduler.constraints.compiler import ConstraintCompiler
from stepahead.scheduler.constraints.token_table import token_table
from stepahead.scheduler.core import LaneConfig, LaneId
from stepahead.scheduler.engine import Engine
from stepahead.scheduler.link_owner import WorkerRefused
from stepahead.scheduler.served_model import ServedModel
from stepahead.scheduler.settings import Settings
from stepahead.scheduler.text.bundle import load_bundle
from stepahead.scheduler.text.errors import TextError
from stepahead.scheduler.worker_link import WorkerLink
from stepahead.scheduler.worker_names import WorkerName, parse_worker, resolve
from stepahead.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger("cluster")

MAX_BUNDLE_BYTES = 256 * 2**20


class Cluster:
    """Dials every configured worker and keeps dialling. Tells the engine which lanes stand."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.instance_id = secrets.token_hex(8)
        self.model: ServedModel | None = None
        self.compiler: ConstraintCompiler | None = None
        """Of the served model, if it has a tokenizer. Its engine is loaded by the first constraint."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a lane opens or is lost."""
        self.on_worker_refused: Callable[[str, str], None] = lambda _address, _reason: None
        """Called with the address of a worker that cannot join, and why, each time it is asked."""
        self._engine = engine
        engine.on_fatal = end_process
        engine.why_no_worker = self._why_no_worker
        self._epoch = 0
        self._adopting = asyncio.Lock()
        self._settings = settings
        self._next_lane = 0
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._followers: list[asyncio.Task[None]] = []
        # Addresses by where they come from: a name, or "" for those that were configured.
        self._wanted: dict[str, frozenset[str]] = {}

    @property
    def links(self) -> list[WorkerLink]:
        """One per worker address, in the order in which they became known."""
        return list(self._tasks)

    def start(self) -> None:
        """Starts one task per worker, and one per name that stands for workers."""
        workers = [parse_worker(worker) for worker in self._settings.workers]
        # Not by `_want` alone: these keep their configured order.
        for worker in workers:
            if isinstance(worker, str):
                self._dial(worker)
        self._want("", frozenset(worker for worker in workers if isinstance(worker, str)))
        for worker in workers:
            if isinstance(worker, WorkerName):
                follower = asyncio.create_task(self._follow(worker), name=f"worker name {worker}")
                follower.add_done_callback(_end_if_died)
                self._followers.append(follower)

    async def _follow(self, name: WorkerName) -> None:
        """Resolves a name for ever. A name without an answer says nothing about the workers that are known."""
        resolved = True
        while True:
            try:
                addresses = await resolve(name)
            except OSError as error:
                if resolved:
                    log.warning("worker name not resolved", name=str(name), error=str(error))
                resolved = False
            else:
                resolved = True
                self._want(str(name), addresses)
            await asyncio.sleep(self._settings.resolve_interval_s)

    def _want(self, source: str, addresses: frozenset[str]) -> None:
        """Dials addresses that are new; lets links go, once their session has ended, that nobody names any more."""
        self._wanted[source] = addresses
        wanted = frozenset[str]().union(*self._wanted.values())
        for link in self._tasks:
            gone = link.address not in wanted
            if link.is_retired != gone:
                log.info("worker gone" if gone else "worker is back", worker=link.address)
                link.retire(retired=gone)
        for address in sorted(wanted.difference(link.address for link in self._tasks)):
            self._dial(address)

    def _dial(self, address: str) -> None:
        link = WorkerLink(LaneId(self._next_lane), address, self, self._settings, self.instance_id)
        self._next_lane += 1
        task = asyncio.create_task(link.run(), name=f"worker link {address}")
        self._tasks[link] = task
        task.add_done_callback(lambda _: self._link_ended(link))

    def _link_ended(self, link: WorkerLink) -> None:
        _end_if_died(self._tasks.pop(link))
        # Its address may have come back at the last moment.
        if any(link.address in addresses for addresses in self._wanted.values()):
            self._dial(link.address)

    async def stop(self, timeout_s: float = 3.0) -> None:
        """Closes every session in an orderly way, then cancels what is left."""
        self._wanted.clear()
        if self.compiler is not None:
            await self.compiler.close()
        for follower in self._followers:
            follower.cancel()
        for link in self._tasks:
            link.close()
        tasks = [*self._tasks.values(), *self._followers]
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=timeout_s)
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_ready(self) -> bool:
        """Whether any worker can run steps now."""
        return any(link.is_ready for link in self.links)

    def require_model(self) -> ServedModel:
        """The served model.

        Raises:
            Unavailable: no worker has answered yet.
        """
        if self.model is None:
            raise self._engine.no_worker("NOT_READY", "no worker is ready yet")
        return self.model

    def _why_no_worker(self) -> str:
        refused = [link for link in self.links if link.refusal]
        if not refused:
            return ""
        others = f" ({len(refused) - 1} more were refused)" if len(refused) > 1 else ""
        return f"the worker at {refused[0].address} was refused: {refused[0].refusal}{others}"

    # -------------------------------------------------------------------------------------------- LinkOwner

    async def adopt(self, link: WorkerLink, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        """The first worker's model becomes the served one; later workers must agree with it.

        Raises:
            WorkerRefused: another model, another context length, or an unusable tokenizer bundle.
        """
        async with self._adopting:
            if self.model is not None:
                difference = self.model.difference(link.info)
                if difference is not None:
                    raise WorkerRefused(difference)
                return
            bundle, sha256 = await _fetch_bundle(link.info, stub)
            try:
                codec = load_bundle(bundle, sha256) if bundle else None
            except TextError as error:
                raise WorkerRefused(f"its tokenizer bundle cannot be used: {error}") from error
            self.model = ServedModel.from_worker(link.info, codec=codec, bundle=bundle, sha256=sha256)
            if codec is not None:
                self.compiler = ConstraintCompiler(partial(token_table, codec, self.model.vocab_size))
            log.info("model served", model=self.model.name, max_model_len=self.model.max_model_len)

    def on_refused(self, link: WorkerLink, reason: str) -> None:
        """Logs it and passes it on."""
        log.error("worker refused", worker=link.address, reason=reason)
        self.on_worker_refused(link.address, reason)

    def next_epoch(self) -> int:
        """Epochs count from 1 within this process; the instance id tells processes apart."""
        self._epoch += 1
        return self._epoch

    def open_lane(self, link: WorkerLink, config: LaneConfig, epoch: int) -> None:
        """Forwards to the engine."""
        self._engine.open_lane(link, config, epoch)
        self.on_change()

    def lose_lane(self, link: WorkerLink, reason: str) -> None:
        """Forwards to the engine."""
        self._engine.lose_lane(link, reason)
        self.on_change()

    def on_boundary(self, link: WorkerLink, boundary: worker_pb2.StepBoundary, read_ns: int) -> None:
        """Forwards to the engine."""
        self._engine.on_boundary(link, boundary, read_ns)

    def on_step_failed(self, link: WorkerLink, epoch: int, step_id: int) -> None:
        """Forwards to the engine."""
        self._engine.on_step_failed(link, epoch, step_id)


async def _fetch_bundle(
    info: worker_pb2.GetWorkerInfoResponse, stub: worker_pb2_grpc.WorkerServiceAsyncStub
) -> tuple[bytes, str]:
    """The tokenizer bundle and its checked digest; empty if the worker has none."""
    if not info.model.has_tokenizer:
        return b"", ""
    data = bytearray()
    sha256 = ""
    async for chunk in stub.GetTokenizerBundle(worker_pb2.GetTokenizerBundleRequest(), timeout=60.0):
        data += chunk.data
        sha256 = chunk.sha256 or sha256
        if len(data) > MAX_BUNDLE_BYTES:
            raise WorkerRefused(f"its tokenizer bundle is larger than {MAX_BUNDLE_BYTES} bytes")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise WorkerRefused("its tokenizer bundle does not match its digest")
    return bytes(data), sha256


def _end_if_died(task: asyncio.Task[None]) -> None:
    """A link task that dies is a bug: the process must end, not go on with a silent lane (rule O5)."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("link died", task=task.get_name(), exc_info=task.exception())
        asyncio.get_running_loop().call_soon(_raise_system_exit)


def end_process(error: Exception) -> None:
    """A fault that leaves the process half-way: it must end, and a supervisor start it again (rule O5)."""
    log.critical("scheduler failed", exc_info=error)
    asyncio.get_running_loop().call_soon(_raise_system_exit)


def _raise_system_exit() -> None:
    raise SystemExit(70)
