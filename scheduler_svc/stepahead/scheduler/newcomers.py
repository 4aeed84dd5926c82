"""New requests while no worker is there: they wait at the door for one that was lost and may come back.

Accepted requests wait in the core's queue. A newcomer cannot: what it may ask for depends on the sizes of the
lanes, and there are none. So it waits here, in the order of arrival, and is accepted when a lane opens.
"""

from __future__ import annotations

import asyncio

from stepahead.scheduler.core import QueueFull
from stepahead.scheduler.engine import Engine
from stepahead.scheduler.errors import DeadlineExceeded, Overloaded, Unavailable
from stepahead.scheduler.settings import Settings

Name = tuple[str, str]
"""Tenant and public id."""


class Newcomers:
    """Those who wait for a worker, first come first."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._waiting: dict[asyncio.Future[bool], tuple[Name, int]] = {}
        """By what wakes them: who, and how many choices. The result says whether to wait no longer."""
        engine.on_lane_opened = self._wake

    @property
    def num_waiting(self) -> int:
        """Sequences that wait here."""
        return sum(num_choices for _, num_choices in self._waiting.values())

    async def wait_for_worker(self, name: Name, num_choices: int, *, deadline_s: float | None) -> None:
        """Returns when a lane is open, or when the newcomer is released.

        Args:
            name: whose request it is, and its id.
            num_choices: how many places of the queue it takes.
            deadline_s: of the request, on the loop's clock; None without one.

        Raises:
            Overloaded: the queue would be full.
            DeadlineExceeded: no worker came before the request's own deadline.
            Unavailable: none came for as long as the settings say, or none has come for long.
        """
        engine, loop = self._engine, asyncio.get_running_loop()
        since_s = loop.time()
        give_up_s = min(since_s + self._settings.worker_wait_s, engine.no_lane_since_s + self._settings.lane_wait_s)
        while not engine.links:
            if loop.time() >= give_up_s:
                raise Unavailable("NOT_READY", f"no worker is ready; waited {loop.time() - since_s:.3g} s for one")
            if deadline_s is not None and loop.time() >= deadline_s:
                text = "the deadline passed in phase queue after 0 tokens: no worker is ready"
                raise DeadlineExceeded(text, metadata={"phase": "queue", "output_tokens": "0"})
            num_waiting = self.num_waiting + len(engine.core.waiting)
            if num_waiting + num_choices > self._settings.max_waiting_requests:
                raise Overloaded(str(QueueFull(num_waiting)), retry_delay_ms=1000)
            until_s = give_up_s if deadline_s is None else min(give_up_s, deadline_s)
            if await self._is_released(name, num_choices, until_s):
                return

    async def _is_released(self, name: Name, num_choices: int, until_s: float) -> bool:
        woken = asyncio.get_running_loop().create_future()
        self._waiting[woken] = (name, num_choices)
        try:
            async with asyncio.timeout_at(until_s):
                return await woken
        except TimeoutError:
            return False
        finally:
            del self._waiting[woken]

    def _wake(self) -> None:
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(False)

    def release(self, name: Name | None = None) -> None:
        """Lets newcomers of this name, or all, wait no longer: whoever waits looks why."""
        for woken, (each, _) in self._waiting.items():
            if name in (None, each) and not woken.done():
                woken.set_result(True)
