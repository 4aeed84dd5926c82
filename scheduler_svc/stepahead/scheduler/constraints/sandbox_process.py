"""This side of a sandbox process: starts it when it is needed, kills it when it is late, starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Final, cast

from stepahead.scheduler.constraints.errors import ConstraintInvalid, ConstraintUnavailable
from stepahead.scheduler.constraints.spec import ConstraintSpec

_START_TIMEOUT_S: Final = 30.0
_NUM_STARTS: Final = 2
"""A process that was killed from outside says nothing about the next one."""
_END_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one constraint may take."""

    compile_s: float = 5.0
    """Wall time in the sandbox, seconds; waiting for the sandbox does not count."""
    memory_bytes: int = 1 * 2**30
    """Address space of a sandbox process, about 250 MB of it for the interpreter and a tokenizer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A constraint that passed."""

    grammar: str
    cost_bytes: int
    """Memory it took: at least its own length."""


class SandboxProcess:
    """One process, for one constraint at a time."""

    __slots__ = ("_hello", "_limits", "_process")

    def __init__(self, hello: bytes, limits: SandboxLimits) -> None:
        """Starts nothing yet.

        Args:
            hello: The first message (`hello_message`).
            limits: For each constraint.
        """
        self._hello = hello
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> bool:
        """Starts the process and waits until it is ready, unless it is.

        Returns:
            Whether it had to be started.

        Raises:
            ConstraintUnavailable: It does not start.
        """
        if self._process is not None and self._process.returncode is None:
            return False
        for attempt in range(_NUM_STARTS):
            try:
                await self._start()
            except (OSError, EOFError, TimeoutError) as error:
                if attempt == _NUM_STARTS - 1:
                    raise ConstraintUnavailable("the sandbox process does not start") from error
            else:
                break
        return True

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stepahead.scheduler.constraints.sandbox"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # glibc reserves address space per thread, which would count against the limit by chance.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._exchange(self._process, self._hello)
        except BaseException:
            await self.kill()
            raise

    async def compile(self, spec: ConstraintSpec) -> Verdict:
        """Parses, compiles and tries a constraint.

        Raises:
            ConstraintInvalid: It is wrong, takes too long or too much memory.
            ConstraintUnavailable: The process does not start.
        """
        is_fresh = await self.start()
        try:
            answer = await self._ask(spec)
        except (OSError, EOFError) as error:
            # One that had been idle may have been killed from outside: only a fresh one speaks of the constraint.
            try:
                if is_fresh:
                    raise
                await self.start()
                answer = await self._ask(spec)
            except (OSError, EOFError):
                # Which of them ended it cannot be told from outside: each ends it with SIGABRT.
                memory_mib = self._limits.memory_bytes >> 20
                text = f"too complex: nested too deeply, too many properties, or more than {memory_mib} MiB needed"
                raise ConstraintInvalid(spec.field, text) from error
        if "field" in answer:
            raise ConstraintInvalid(answer["field"], answer["description"])
        return Verdict(answer["grammar"], answer["cost_bytes"])

    async def _ask(self, spec: ConstraintSpec) -> dict[str, Any]:
        """One question; the process is gone if this raises."""
        assert self._process is not None
        request = json.dumps({"kind": spec.kind.value, "texts": spec.texts}).encode()
        try:
            async with asyncio.timeout(self._limits.compile_s):
                return await self._exchange(self._process, request)
        except TimeoutError as error:
            await self.kill()
            text = f"too complex: not compiled within {self._limits.compile_s:g} s"
            raise ConstraintInvalid(spec.field, text) from error
        except (OSError, EOFError):
            await self._reap()
            raise
        except BaseException:
            # Cancelled: an answer that nobody reads would be taken for the next one.
            await self.kill()
            raise

    async def kill(self) -> None:
        """Ends the process, if there is one, and waits for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()

    async def _reap(self) -> None:
        """Waits for a process that ends by itself: to signal it meanwhile would take its exit from asyncio."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._process.wait()
        await self.kill()

    @staticmethod
    async def _exchange(process: asyncio.subprocess.Process, message: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(message).to_bytes(4, "big") + message)
            await process.stdin.drain()
        except RuntimeError as error:  # how uvloop says that the process has closed its end
            raise BrokenPipeError(str(error)) from error
        size = int.from_bytes(await process.stdout.readexactly(4), "big")
        return cast("dict[str, Any]", json.loads(await process.stdout.readexactly(size)))


def hello_message(pieces: tuple[bytes, ...], eos_ids: tuple[int, ...], limits: SandboxLimits) -> bytes:
    """What a sandbox hears first: the tokenizer and its memory limit."""
    hello = {
        "memory_bytes": limits.memory_bytes,
        "eos_ids": eos_ids,
        "pieces": [piece.decode("latin-1") for piece in pieces],
    }
    return json.dumps(hello).encode()
