"""An idle server frees what is left of requests."""

from __future__ import annotations

import asyncio
import gc

import pytest

from stepahead.scheduler.core import RequestKey
from stepahead.scheduler.server import COLLECT_AFTER, Server
from stepahead.scheduler.settings import Settings
from stepahead.v1 import generation_pb2
from tests.scheduler.requests import live_request


async def test_garbage_is_looked_for_after_many_requests_and_never_under_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(Settings(listen="", workers=(), overlap_depth=1), asyncio.get_running_loop())
    collections: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(1))
    book = server.engine.book
    book.totals["accepted"] = COLLECT_AFTER - 1
    server.collect_if_idle()
    assert not collections, "too few to be worth it"
    live = await live_request(generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIdsInput(ids=[1])))
    live.choices[0].key = RequestKey(1)
    book.add(live)
    server.collect_if_idle()
    assert not collections, "somebody waits"
    del book.requests[live.key]
    server.collect_if_idle()
    server.collect_if_idle()
    assert len(collections) == 1
