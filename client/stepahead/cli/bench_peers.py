"""A peer behind a script (`--vs`): a process that reads workloads and writes results, one JSON line each.

scripts/peers/peer.py has the contract; the scripts beside it speak for other engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from types import TracebackType
from typing import Any, Self, cast

from stepahead.cli.bench_processes import ResourceWatch
from stepahead.cli.bench_systems import TimedRun
from stepahead.cli.bench_workload import Workload, as_json
from stepahead.cli.failures import StackError, describe_exit

START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0

# A result names the time of every token.
_LINE_LIMIT = 2**26


class Peer:
    """A running peer. An async context manager: it starts with it and ends with it.

    Args:
        command: as typed; split like a shell does.
    """

    def __init__(self, command: str) -> None:
        self._argv = shlex.split(command)
        self._process: asyncio.subprocess.Process | None = None
        self.name = command
        self.open_loop = False
        self.facts: dict[str, Any] = {}
        """What it says of itself: versions, precision, settings."""

    async def __aenter__(self) -> Self:
        try:
            # A session of its own: everything the peer starts ends with it.
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=_LINE_LIMIT,
            )
        except (OSError, IndexError) as error:
            raise StackError(f"--vs {self.name}: cannot be started: {error}") from error
        try:
            ready = await self._read(START_TIMEOUT_S)
            self.name = str(ready["ready"])
            self.open_loop = bool(ready.get("open_loop"))
            self.facts = {key: value for key, value in ready.items() if key not in ("ready", "open_loop")}
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def pids(self) -> tuple[int, ...]:
        """See `System.pids`."""
        return () if self._process is None else (self._process.pid,)

    async def run(self, workload: Workload) -> TimedRun:
        """See `System.run`. Raises StackError if it fails, or makes another number of tokens."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        async with ResourceWatch([process.pid]) as used:
            process.stdin.write(json.dumps(as_json(workload), separators=(",", ":")).encode() + b"\n")
            await process.stdin.drain()
            result = await self._read(RUN_TIMEOUT_S)
        times = cast("list[list[float]]", result["token_times_s"])
        expected = [item.output_tokens for item in workload.items]
        if [len(each) for each in times] != expected:
            raise StackError(f"{self.name} made {sum(map(len, times))} tokens, not {sum(expected)}")
        due = [[at_s - item.at_s for at_s in each] for each, item in zip(times, workload.items, strict=True)]
        return TimedRun(max(each[-1] for each in times), due, used.peak_bytes)

    async def _read(self, timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
        except TimeoutError as error:
            raise StackError(f"{self.name} said nothing for {timeout_s:g} s") from error
        if not line:
            raise StackError(f"{self.name} {describe_exit(await process.wait())}", advice="its stderr is above")
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise StackError(f"{self.name} wrote a line that is no JSON: {line[:80]!r}") from error
        if not isinstance(fields, dict) or "error" in fields:
            raise StackError(f"{self.name} failed: {line.decode(errors='replace').strip()[:500]}")
        return cast("dict[str, Any]", fields)

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        with contextlib.suppress(TimeoutError):  # it is killed below, like whatever it has left behind
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        await process.wait()
