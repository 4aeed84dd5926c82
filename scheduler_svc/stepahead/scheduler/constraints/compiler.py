"""From a client's constraint to matchers: compiled once, off the event loop, within limits (rule I6)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stepahead.scheduler.constraints.errors import (
    ConstraintBusy,
    ConstraintError,
    ConstraintInvalid,
    ConstraintUnavailable,
)
from stepahead.scheduler.constraints.sandbox_process import SandboxLimits, SandboxProcess, hello_message
from stepahead.scheduler.constraints.spec import ConstraintSpec
from stepahead.scheduler.constraints.token_table import TokenTable

if TYPE_CHECKING:
    from stepahead.scheduler.constraints.engine import Engine
    from stepahead.scheduler.constraints.matcher import Matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """Bounds of a compiler."""

    sandbox: SandboxLimits = field(default_factory=SandboxLimits)
    num_sandboxes: int = 2
    """Processes; the second starts when the first is busy, so that one hostile constraint holds nobody up."""
    max_pending: int = 64
    """Different constraints that may be compiled or wait for it at a time."""
    max_entries: int = 256
    """Constraints kept."""
    max_cached_bytes: int = 256 * 2**20
    """Memory of the constraints kept, as measured in the sandbox."""
    failure_ttl_s: float = 30.0
    """How long a refusal is remembered, seconds."""


class CompiledConstraint:
    """A constraint that passed. Immutable, safe to share."""

    __slots__ = ("_beginning", "cost_bytes")

    def __init__(self, beginning: Matcher, cost_bytes: int) -> None:
        """Keeps a matcher that nobody advances."""
        self._beginning = beginning
        self.cost_bytes = cost_bytes

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text; one per choice."""
        return self._beginning.fork()


_Outcome = CompiledConstraint | ConstraintError


class ConstraintCompiler:
    """Compiles for one model. Belongs to one event loop."""

    def __init__(
        self,
        read_table: Callable[[], TokenTable],
        limits: CompilerLimits | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            read_table: Gives the model's token table; called once, in a thread.
            limits: Defaults serve a model of 50,000 to 260,000 tokens.
        """
        self._read_table = read_table
        self._limits = limits or CompilerLimits()
        self._starting: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        # llguidance panics are caught, but a thread of its own keeps other pools free.
        self._builder = ThreadPoolExecutor(1, "constraint-build")
        self._idle: asyncio.LifoQueue[SandboxProcess] = asyncio.LifoQueue()
        self._sandboxes: list[SandboxProcess] = []
        self._pending: dict[str, asyncio.Task[_Outcome]] = {}
        self._cache: OrderedDict[str, CompiledConstraint] = OrderedDict()
        self._cached_bytes = 0
        self._failures: OrderedDict[str, tuple[float, ConstraintInvalid]] = OrderedDict()
        self._closed = False

    async def start(self) -> None:
        """Loads the engine. Else the first compile does, which holds the interpreter lock for 0.1 s and more.

        Raises:
            ConstraintUnavailable: The tokenizer cannot be used.
        """
        if self._closed:
            raise ConstraintUnavailable("the constraint compiler is closed")
        if self._starting is None or (self._starting.done() and self._engine is None):
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def compile(self, spec: ConstraintSpec) -> CompiledConstraint:
        """The compiled constraint: from the cache, or from a compile that all who ask at the same time share.

        Cancelling a caller leaves the compile to the others.

        Raises:
            ConstraintInvalid: The client's constraint must be refused.
            ConstraintBusy: Too many are waiting.
            ConstraintUnavailable: Nothing can be compiled.
        """
        digest = spec.digest
        cached = self._cache.get(digest)
        if cached is not None:
            self._cache.move_to_end(digest)
            return cached
        failure = self._failure(digest)
        if failure is not None:
            raise failure
        task = self._pending.get(digest)
        if task is None:
            if self._closed:
                raise ConstraintUnavailable("the constraint compiler is closed")
            if len(self._pending) >= self._limits.max_pending:
                raise ConstraintBusy(f"{len(self._pending)} constraints are being compiled")
            task = self._pending[digest] = asyncio.create_task(self._compile(spec, digest))
        # A cancelled task means close().
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise ConstraintUnavailable("the constraint compiler is closed") from None
            raise
        if isinstance(outcome, ConstraintError):
            # Each caller its own: raising one object twice would chain the callers' tracebacks.
            raise _copied(outcome)
        return outcome

    async def close(self) -> None:
        """Kills the processes; compiles that are under way end with ConstraintUnavailable."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [*self._pending.values(), *([self._starting] if self._starting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sandbox in self._sandboxes:
            await sandbox.kill()
        self._builder.shutdown(wait=False, cancel_futures=True)

    @property
    def sandbox_pids(self) -> list[int]:
        """Processes that are running."""
        return [sandbox.pid for sandbox in self._sandboxes if sandbox.pid is not None]

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        hello, self._engine = await loop.run_in_executor(self._builder, self._load)
        for _ in range(self._limits.num_sandboxes):
            sandbox = SandboxProcess(hello, self._limits.sandbox)
            self._sandboxes.append(sandbox)
            self._idle.put_nowait(sandbox)

    def _load(self) -> tuple[bytes, Engine]:
        from stepahead.scheduler.constraints.engine import Engine  # noqa: PLC0415 - loads llguidance

        table = self._read_table()
        return hello_message(table.pieces, table.eos_ids, self._limits.sandbox), Engine(table)

    async def _compile(self, spec: ConstraintSpec, digest: str) -> _Outcome:
        try:
            compiled = await self._compiled(spec)
        except ConstraintInvalid as error:
            self._failures[digest] = (asyncio.get_running_loop().time() + self._limits.failure_ttl_s, error)
            while len(self._failures) > self._limits.max_entries:
                self._failures.popitem(last=False)
            return error
        except ConstraintError as error:
            return error
        finally:
            del self._pending[digest]
        self._keep(digest, compiled)
        return compiled

    async def _compiled(self, spec: ConstraintSpec) -> CompiledConstraint:
        await self.start()
        assert self._engine is not None
        # Last in, first out: the second process starts only when the first is busy.
        sandbox = await self._idle.get()
        try:
            verdict = await sandbox.compile(spec)
        finally:
            self._idle.put_nowait(sandbox)
        build = asyncio.get_running_loop().run_in_executor(self._builder, _warm, self._engine, verdict.grammar)
        return CompiledConstraint(await build, verdict.cost_bytes)

    def _keep(self, digest: str, compiled: CompiledConstraint) -> None:
        self._cache[digest] = compiled
        self._cached_bytes += compiled.cost_bytes
        # The newest stays even if it is larger than the bound by itself.
        while len(self._cache) > 1 and (
            len(self._cache) > self._limits.max_entries or self._cached_bytes > self._limits.max_cached_bytes
        ):
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.cost_bytes

    def _failure(self, digest: str) -> ConstraintInvalid | None:
        entry = self._failures.get(digest)
        if entry is None:
            return None
        expires_at, error = entry
        if asyncio.get_running_loop().time() >= expires_at:
            del self._failures[digest]
            return None
        return ConstraintInvalid(error.field, error.description)


def _warm(engine: Engine, grammar: str) -> Matcher:
    # The first mask costs the most; forks inherit what the engine learns from it.
    beginning = engine.build(grammar)
    beginning.mask()
    return beginning


def _copied(error: ConstraintError) -> ConstraintError:
    if isinstance(error, ConstraintInvalid):
        return ConstraintInvalid(error.field, error.description)
    return type(error)(str(error))
