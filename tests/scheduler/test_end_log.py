"""The canonical line of every request that has ended."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from stepahead.scheduler import end_log
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
        log.close()
        log.close()
        assert [line["request_key"] for line in lines] == list(range(2 * SLICE))
        loop.advance(10 * PAUSE_S)
        assert len(lines) == 2 * SLICE


async def test_what_ends_after_the_close_is_written_at_once() -> None:
    """After a fault that ends the process, calls are cancelled in any order, and no timer fires any more."""
    loop = FakeLoop()
    log = EndLog(cast(asyncio.AbstractEventLoop, loop))
    log.close()
    with capture_logs() as lines:
        await ended(log, 1)
        assert [line["request_key"] for line in lines] == [1]
    assert loop.num_timers == 0


async def test_a_line_that_cannot_be_written_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FakeLoop()
    log = EndLog(cast(asyncio.AbstractEventLoop, loop))
    write = end_log.log.info

    def write_unless_full(event: str, *, request_key: int, **facts: object) -> None:
        if request_key == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(event, request_key=request_key, **facts)

    with capture_logs() as lines:
        monkeypatch.setattr(end_log, "log", SimpleNamespace(info=write_unless_full))
        for number in range(4):
            await ended(log, number)
        with pytest.raises(OSError, match="No space left"):
            loop.advance(PAUSE_S + TICK_S)
        loop.advance(PAUSE_S + TICK_S)
        assert [line["request_key"] for line in lines] == [0, 2, 3]
