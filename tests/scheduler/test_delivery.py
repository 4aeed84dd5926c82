"""The message budget under a clock that the test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepahead.scheduler.delivery import SLICE, MessageBudget

TICK_S = 1e-6
"""What running a callback takes, as on a real loop."""


class FakeLoop:
    """As much of an event loop as the budget uses; time passes only in `advance`."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., None], *args: object) -> asyncio.TimerHandle:
        assert delay >= 0
        self._count += 1
        number = self._count
        heapq.heappush(self._timers, (self.now + delay, number, partial(callback, *args)))

        def cancel() -> None:
            self._timers = [timer for timer in self._timers if timer[1] != number]
            heapq.heapify(self._timers)

        return cast(asyncio.TimerHandle, SimpleNamespace(cancel=cancel))

    def call_soon(self, callback: Callable[..., None], *args: object) -> Any:
        return self.call_later(0.0, callback, *args)

    def advance(self, seconds: float) -> None:
        """Runs every timer that is due."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, callback = heapq.heappop(self._timers)
            self.now = max(self.now, due) + TICK_S
            callback()
        self.now = max(self.now, end)

    @property
    def num_timers(self) -> int:
        return len(self._timers)


class Writer:
    """A stream that notes its turns and takes them at once."""

    def __init__(self, name: int, turns: list[int], *, takes_turns: bool = True) -> None:
        self.queued = False
        self.woken = False
        self._name = name
        self._turns = turns
        self._takes_turns = takes_turns

    def wake(self) -> None:
        self._turns.append(self._name)
        if self._takes_turns:
            self.woken = False  # set by the budget just before

    def take(self) -> None:
        self.woken = False


def budget(rate: int = 1000) -> tuple[MessageBudget, FakeLoop]:
    loop = FakeLoop()
    return MessageBudget(cast(asyncio.AbstractEventLoop, loop), rate, loop.time), loop


def test_while_streams_are_few_nobody_waits() -> None:
    it, loop = budget()
    turns: list[int] = []
    for name in range(5):
        it.request(Writer(name, turns))
    it.pump()
    assert turns == [], "who pumps may be about to plan a step"
    loop.advance(TICK_S)
    assert turns == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cost_s", [50e-6, 200e-6])
def test_the_loop_rests_for_as_long_as_a_slice_took(cost_s: float) -> None:
    """Boundaries have the loop to themselves half of the time, whatever a message costs here and now."""
    it, loop = budget(rate=10_000)
    written: list[float] = []

    class Stream(Writer):
        def wake(self) -> None:
            self.woken = False
            loop.now += cost_s
            written.append(loop.now)

    for name in range(3 * SLICE):
        it.request(Stream(name, []))
    it.pump()
    loop.advance(1.0)
    assert len(written) == 3 * SLICE
    gaps = [later - earlier for earlier, later in itertools.pairwise(written)]
    for number, gap in enumerate(gaps, 1):
        rest = 0.0 if number % SLICE else SLICE * cost_s
        assert gap == pytest.approx(cost_s + rest, abs=2 * SLICE * TICK_S)
    assert loop.num_timers == 0


def test_a_stream_may_ask_for_turns_in_its_turn() -> None:
    """One that ends another, say, makes news for that one's stream: it has its turn with the next slice."""
    it, loop = budget(rate=10_000)
    turns: list[int] = []
    other, third = Writer(2, turns), Writer(3, turns)

    class Ending(Writer):
        def wake(self) -> None:
            super().wake()
            it.urgent(other)
            it.request(third)
            it.pump()
            assert turns == [1], "not inside its own"

    it.request(Ending(1, turns))
    it.pump()
    loop.advance(0.01)
    assert turns == [1, 2, 3]
    assert loop.num_timers == 0


def test_the_rate_is_kept_over_time_in_round_robin() -> None:
    rate = 1000
    it, loop = budget(rate)
    turns: list[int] = []
    writers = [Writer(name, turns) for name in range(300)]
    it.pump()
    for _ in range(1000):  # one second of steps, each with news for everybody
        for writer in writers:
            it.request(writer)
        it.pump()
        loop.advance(0.001)
    burst = max(SLICE, rate // 20)
    assert rate * 0.95 <= len(turns) <= rate + burst
    assert it.num_messages == len(turns)
    counts = [turns.count(name) for name in range(300)]
    assert max(counts) - min(counts) <= 1, "nobody is left out"


def test_news_of_a_queued_stream_are_one_message() -> None:
    it, loop = budget()
    turns: list[int] = []
    busy = [Writer(name, turns) for name in range(200)]
    for writer in busy:
        it.request(writer)
    it.pump()
    waiting = next(writer for writer in busy if writer.queued)
    for _ in range(10):
        it.request(waiting)
    loop.advance(1.0)
    assert sorted(turns) == list(range(200)), "each exactly once"


def test_first_tokens_and_ends_go_first() -> None:
    """Whatever the rate leaves: at once where the budget is what others wait for, else with the next slice."""
    it, loop = budget(rate=100)
    turns: list[int] = []
    for name in range(100):
        it.request(Writer(name, turns))
    it.pump()
    loop.advance(0.01)
    assert len(turns) == SLICE
    late = Writer(777, turns)
    it.urgent(late)
    loop.advance(TICK_S)
    assert turns[SLICE] == 777
    assert not late.queued
    before = len(turns)
    queued = Writer(778, turns)
    it.request(queued)
    it.urgent(queued)
    loop.advance(10 * TICK_S)
    assert turns[before:] == [778]
    loop.advance(10.0)
    assert turns.count(778) == 1, "its place in the queue is void"


def test_a_burst_of_ends_leaves_the_loop_free_in_between() -> None:
    """Hundreds of streams may speak first, or end, in one step: they pass those who wait, in slices."""
    it, loop = budget(rate=10_000)
    turns: list[int] = []

    class Stream(Writer):
        def wake(self) -> None:
            super().wake()
            loop.now += TICK_S

    for name in range(2 * SLICE):
        it.request(Stream(name, turns))
    for name in range(100, 100 + 3 * SLICE):
        it.urgent(Stream(name, turns))
    loop.advance(TICK_S)
    assert turns == list(range(100, 100 + SLICE))
    loop.advance(0.1)
    assert turns == [*range(100, 100 + 3 * SLICE), *range(2 * SLICE)]


def test_urgent_messages_are_charged_to_the_others() -> None:
    it, loop = budget(rate=100)
    turns: list[int] = []
    for name in range(500):
        it.urgent(Writer(name, turns))
    it.request(Writer(1000, turns))
    it.pump()
    loop.advance(1.0)
    assert turns == list(range(500))
    loop.advance(5.0)
    assert turns[-1] == 1000


def test_a_stream_that_has_not_taken_its_turn_is_not_woken_again() -> None:
    it, loop = budget()
    turns: list[int] = []
    slow = Writer(1, turns, takes_turns=False)
    it.urgent(slow)
    loop.advance(1.0)
    assert slow.woken
    it.request(slow)
    it.pump()
    it.urgent(slow)
    loop.advance(1.0)
    assert turns == [1]
    assert it.num_messages == 1
    slow.take()
    it.request(slow)
    it.pump()
    loop.advance(1.0)
    assert turns == [1, 1]
