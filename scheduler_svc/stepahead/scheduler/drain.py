"""Graceful drain: no admission, everything accepted ends, results are flushed (rule O6)."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import structlog

from stepahead.scheduler.errors import Unavailable
from stepahead.scheduler.front_end import FrontEnd

log = structlog.get_logger("drain")


@dataclass(frozen=True, slots=True)
class DrainResult:
    """How the accepted requests ended."""

    num_finished: int
    num_cancelled: int
    """Ended with UNAVAILABLE: the time was over, or no worker came for them."""


class Drainer:
    """Drains the front end, on request or before the process ends."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end
        self._over = asyncio.Event()
        """Set when there is nothing left to wait for."""
        self._is_final = False
        self._in_haste = False
        front_end.engine.book.on_idle = self._note_idle

    async def stop(self, timeout_s: float) -> int:
        """The drain before the process ends; nothing takes it back.

        Returns:
            Requests that did not finish in time; none if nobody waited for them (`hurry`).
        """
        self._is_final = True
        result = await self.drain(timeout_s)
        return 0 if self._in_haste else result.num_cancelled

    def hurry(self) -> None:
        """Waits no longer, now and from now on: what is left is cancelled, and told so."""
        self._in_haste = True
        self._over.set()

    async def drain(self, timeout_s: float | None) -> DrainResult:
        """Stops admission and waits; after `timeout_s` what is left is cancelled. None: waits for ever."""
        front_end = self._front_end
        totals = front_end.engine.book.totals
        front_end.draining = True
        num_live, num_unserved = len(front_end.unended), totals["unserved"]
        log.info("draining", num_live=num_live)
        if num_live and not self._in_haste:
            self._over.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._over.wait()
        for live in front_end.unended:
            front_end.end(live, Unavailable("DRAINING", "the server stopped before the request ended"))
        num_cancelled = totals["unserved"] - num_unserved
        await self._flush(1.0 if self._in_haste else 5.0)
        log.info("drained", num_finished=num_live - num_cancelled, num_cancelled=num_cancelled)
        return DrainResult(num_live - num_cancelled, num_cancelled)

    def resume(self) -> None:
        """Takes requests again.

        Raises:
            Unavailable: the process is about to end.
        """
        if self._is_final:
            raise Unavailable("DRAINING", "the server is stopping")
        self._front_end.draining = False

    def _note_idle(self) -> None:
        if not self._front_end.unended:
            self._over.set()

    async def _flush(self, timeout_s: float) -> None:
        """Lets streams deliver their last messages: a stream ends by dropping its request from the registry."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._front_end.empty.wait()
