"""Requests leave nothing that only the collector would free: it seldom looks at what has lived for long."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from tests.e2e.stack import Answer, Stack, read_events, request, serve
from tests.e2e.test_choices import fold as fold_choices
from tests.e2e.test_multiplex import Session

pytestmark = pytest.mark.e2e
WORKER = {"max_num_seqs": 8, "num_kv_blocks": 24, "block_size": 4, "max_model_len": 64}


@contextmanager
def collected() -> Generator[list[object]]:
    """Cyclic garbage of its body, once it is over."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def every_way_to_end(stack: Stack) -> None:
    """Streams, some of them preempted, several choices, a client that leaves, a refused request, Multiplex."""
    messages = [request([1, 2, index], 24) for index in range(8)]
    answers, choices = await asyncio.gather(
        stack.answers(messages), fold_choices(stack.open(request([1, 2, 3], 5, num_choices=3)))
    )
    assert len(choices.ends) == 3
    assert all(answer.ok for answer in answers)
    assert sum(answer.finished.timings.preemptions for answer in answers if answer.finished) > 0
    leaving = stack.open(request([5, 6], 40))
    await read_events(leaving, "delta", Answer())
    leaving.cancel()
    assert not (await stack.generate([1], 1000)).ok
    session = Session(stack)
    for handle in range(1, 5):
        await session.submit(handle, request([7, handle], 12))
    await session.cancel(2)
    await session.read_until(1, 2, 3, 4)
    await session.close()


async def test_requests_leave_no_cycles() -> None:
    """Of ours: what gRPC leaves of a call is gRPC's, messages that its frames know included."""
    async with serve(worker=WORKER) as stack:
        await every_way_to_end(stack)
        await stack.assert_quiescent()
        with collected() as found:
            for _ in range(4):
                await every_way_to_end(stack)
            await stack.assert_quiescent()
            await asyncio.sleep(0.05)  # the last end's line is written
            await stack.generate([1], 1)  # a lane knows the rows of its last step until the next one
            await stack.assert_quiescent()
            await asyncio.sleep(0.05)
    modules = ("stepahead.scheduler.", "stepahead.worker.")
    kinds = Counter(type(each).__qualname__ for each in found if type(each).__module__.startswith(modules))
    assert not kinds
