"""Ranks 1 and up as child processes of rank 0."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from stepahead.worker.ranks.place import LIFELINE, RankPlace

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOSE_TIMEOUT_S = 2.0
PROGRAM = "stepahead.worker"
"""What `python -m` runs as the other ranks."""


class Followers:
    """The other ranks of a worker that starts them itself. Loopback only.

    Each is the same program with the variables that torchrun would set, in a session of its own: Ctrl-C reaches
    rank 0 alone, which then ends them. They hold one end of a pipe whose other end only this process has, so they
    end with it however it ends.

    Args:
        size: ranks of the worker, rank 0 included.
        arguments: of PROGRAM, the same for each.
    """

    def __init__(self, size: int, arguments: Sequence[str]) -> None:
        self._size = size
        self._arguments = arguments
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._lifeline_fd: int | None = None

    async def start(self) -> RankPlace:
        """Starts them; they wait for rank 0 to connect at the place that is returned."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address, port = listener.getsockname()
            read_fd, self._lifeline_fd = os.pipe()
            try:
                for rank in range(1, self._size):
                    self._processes[rank] = await self._spawn(rank, port, read_fd)
            finally:
                os.close(read_fd)
            return RankPlace(
                rank=0,
                size=self._size,
                local_size=self._size,
                address=address,
                port=port,
                listen_fd=listener.detach(),
            )

    async def wait_lost(self) -> str:
        """Waits until one of them ends, for ever if there are none; how it ended, for a person."""
        if not self._processes:
            await asyncio.Event().wait()
        waits = {asyncio.create_task(each.wait()): rank for rank, each in self._processes.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        ended = done.pop()
        return f"rank {waits[ended]} {_describe_exit(ended.result())}"

    async def close(self) -> None:
        """Ends all of them; returns when they have ended."""
        if self._lifeline_fd is not None:
            os.close(self._lifeline_fd)
            self._lifeline_fd = None
        waits = [asyncio.create_task(each.wait()) for each in self._processes.values()]
        if not waits:
            return
        await asyncio.wait(waits, timeout=CLOSE_TIMEOUT_S)
        for process in self._processes.values():
            if process.returncode is None:  # stopped, perhaps: nothing else would end it
                process.kill()
        await asyncio.wait(waits)

    async def _spawn(self, rank: int, port: int, lifeline_fd: int) -> asyncio.subprocess.Process:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            LIFELINE: str(lifeline_fd),
        }
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM, *self._arguments),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(lifeline_fd,),
            start_new_session=True,
        )


def _describe_exit(return_code: int) -> str:
    if return_code >= 0:
        return f"ended with exit code {return_code}"
    return f"was killed by {signal.Signals(-return_code).name}"
