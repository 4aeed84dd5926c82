"""A TCP proxy that breaks connections: resets them, cuts them in the middle of a message, or delays bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FlakyProxy:
    """Forwards connections to one address; a test decides when they break."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._connections: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.is_open = True
        self.delay_s = 0.0
        """How long bytes lie in the proxy before they go on."""
        self.num_connections = 0
        self.num_resets = 0

    async def start(self) -> str:
        """Listens; returns the address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            _reset(writer)
            return
        self.num_connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        pair = (writer, far_writer)
        self._connections.append(pair)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink, pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()
        for writer in pair:
            writer.close()

    def reset(self) -> None:
        """Breaks every connection now, with what is on the way."""
        for pair in self._connections:
            for writer in pair:
                _reset(writer)
            self.num_resets += 1
        self._connections.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST: unsent bytes are lost, the peer reads an error."""
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def flaky(target: str) -> AsyncIterator[tuple[FlakyProxy, str]]:
    """A proxy and its address."""
    proxy = FlakyProxy(target)
    address = await proxy.start()
    try:
        yield proxy, address
    finally:
        await proxy.close()
