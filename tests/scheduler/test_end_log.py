"""The canonical line of every request that has ended."""

from __future__ import annotations

import asyncio
from typing import cast

from structlog.testing import capture_logs

from stepahead.scheduler.core import FinishReason, RequestKey
from stepahead.scheduler.end_log import PAUSE_S, SLICE, EndLog
from stepahead.v1 import generation_pb2
from tests.scheduler.requests import live_request
from tests.scheduler.test_delivery import TICK_S, FakeLoop


async def ended(log: EndLog, number: int) -> None:
    """A request that has ended."""
    live = await live_request(generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIdsInput(ids=[1, 2])))
    live.choices[0].key = RequestKey(number)
    live.choices[0].log.append(3, None)
    log.add(live, FinishReason.LENGTH)


async def test_lines_are_written_in_slices_and_none_is_lost() -> None:
    """One line per end, in order, and never in the turn of an end."""
    loop = FakeLoop()
    log = EndLog(cast(asyncio.AbstractEventLoop, loop))
    count = 2 * SLICE + 3
    with capture_logs() as lines:
        for number in range(count):
            await ended(log, number)
        assert not lines
        loop.advance(PAUSE_S + TICK_S)
        assert len(lines) == SLICE
        loop.advance(10 * PAUSE_S)
        assert [line["request_key"] for line in lines] == list(range(count))
        assert loop.num_timers == 0
        await ended(log, count)
        loop.advance(2 * PAUSE_S)
        assert lines[-1]["request_key"] == count
    line = lines[0]
    assert (line["event"], line["reason"], line["status"]) == ("request ended", "length", "OK")
    assert (line["prompt_tokens"], line["output_tokens"]) == (2, 1)


async def test_what_is_left_is_written_at_the_end() -> None:
    loop = FakeLoop()
    log = EndLog(cast(asyncio.AbstractEventLoop, loop))
    with capture_logs() as lines:
        for number in range(2 * SLICE):
            await ended(log, number)
        log.flush()
        log.flush()
        assert [line["request_key"] for line in lines] == list(range(2 * SLICE))
        loop.advance(10 * PAUSE_S)
        assert len(lines) == 2 * SLICE
