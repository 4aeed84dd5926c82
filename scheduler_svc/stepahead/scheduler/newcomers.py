"""New requests while no worker is there: they wait at the door for one that was lost and may come back.

Accepted requests wait in the core's queue. A newcomer cannot: what it may ask for depends on the sizes of the
lanes, and there are none. So it waits here, in the order of arrival, and goes to the core when a lane opens. It may
then turn out to ask for too much, and ends with that; apart from this a client sees no difference.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stepahead.scheduler.constraints.compiler import CompiledConstraint
from stepahead.scheduler.core import FinishReason, QueueFull
from stepahead.scheduler.core_bridge import deadline_passed
from stepahead.scheduler.engine import Engine
from stepahead.scheduler.errors import ApiError, Overloaded
from stepahead.scheduler.live_request import LiveRequest, now_ns
from stepahead.scheduler.settings import Settings

Name = tuple[str, str]
"""Tenant and public id."""


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """What a request needs to go on, and what ends its wait."""

    compiled: CompiledConstraint | None
    timer: asyncio.TimerHandle


class Newcomers:
    """Those who wait for a worker, first come first.

    How long each may wait is known when it comes, and does not depend on how long the worker has been away. The
    first lane that opens takes all of them, so that none can see a lane open and be lost again. From then on they
    wait as any accepted request does.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._waiting: dict[LiveRequest, _Newcomer] = {}
        engine.on_lane_opened = self._submit_all

    @property
    def requests(self) -> list[LiveRequest]:
        """Those who wait here, oldest first."""
        return list(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait here."""
        return sum(len(live.choices) for live in self._waiting)

    def add(self, live: LiveRequest, compiled: CompiledConstraint | None) -> None:
        """Accepts a request while no lane is open; from here on it ends in exactly one terminal message.

        Args:
            live: the request.
            compiled: its constraint, if it has one.

        Raises:
            Overloaded: the queue would be full.
            Unavailable: the settings say that nobody waits.
        """
        loop, wait_s = asyncio.get_running_loop(), self._settings.worker_wait_s
        if not wait_s:
            raise self._engine.no_worker("NOT_READY", "no worker is ready")
        num_waiting = self.num_waiting + len(self._engine.core.waiting)
        if num_waiting + len(live.choices) > self._settings.max_waiting_requests:
            raise Overloaded(str(QueueFull(num_waiting)), retry_delay_ms=1000)
        accepted = live.accepted
        limits_ms = [limit for limit in (accepted.timeout_ms, accepted.queue_timeout_ms) if limit is not None]
        give_up, until_s = self._refuse, loop.time() + wait_s
        if limits_ms:
            deadline_s = loop.time() + min(limits_ms) / 1000 - (now_ns() - live.times.accepted_ns) / 1e9
            if deadline_s < until_s:
                give_up, until_s = self._expire, deadline_s
        self._waiting[live] = _Newcomer(compiled, loop.call_at(until_s, give_up, live))

    def _refuse(self, live: LiveRequest) -> None:
        text = f"no worker is ready; waited {self._settings.worker_wait_s:.3g} s for one"
        self.end(live, self._engine.no_worker("NOT_READY", text))

    def _expire(self, live: LiveRequest) -> None:
        self.end(live, deadline_passed("queue", 0, self._engine.why_no_worker()))

    def end(self, live: LiveRequest, error: ApiError, reason: FinishReason = FinishReason.ERROR) -> bool:
        """Ends a request that waits here with a status now; whether it does wait here."""
        newcomer = self._waiting.pop(live, None)
        if newcomer is None:
            return False
        newcomer.timer.cancel()
        self._engine.book.end_newcomer(live, error, reason)
        return True

    def _submit_all(self) -> None:
        while self._waiting:
            # One by one: whoever looks meanwhile finds each of them here or in the core.
            live = next(iter(self._waiting))
            newcomer = self._waiting.pop(live)
            newcomer.timer.cancel()
            try:
                self._engine.submit(live, newcomer.compiled)
            except ApiError as error:
                self._engine.book.end_newcomer(live, error)
