"""Fixtures: a fake scheduler, and both clients behind one blocking face."""

import asyncio
from collections.abc import Iterator

import pytest

from stepahead.client import AsyncClient, Client
from tests.client.fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


class BlockingFace:
    """Calls one method of either client, so that one test body covers both."""

    def __init__(self, address: str, kind: str) -> None:
        self._address = address
        self._kind = kind

    def __call__(self, method: str, *args, **options):
        if self._kind == "sync":
            with Client(self._address, call_timeout=20) as client:
                return getattr(client, method)(*args, **options)
        return asyncio.run(self._call(method, args, options))

    async def _call(self, method, args, options):
        async with AsyncClient(self._address, call_timeout=20) as client:
            return await getattr(client, method)(*args, **options)

    def read(self, *args, **options):
        """Everything a stream yields, and its completion."""
        if self._kind == "sync":
            with Client(self._address) as client, client.stream(*args, **options) as stream:
                return list(stream), stream.completion()
        return asyncio.run(self._read(args, options))

    async def _read(self, args, options):
        async with AsyncClient(self._address) as client, client.stream(*args, **options) as stream:
            return [delta async for delta in stream], await stream.completion()


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, fake: FakeServer) -> BlockingFace:
    return BlockingFace(fake.address, request.param)
