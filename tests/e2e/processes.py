"""Workers and schedulers as real processes, told apart from tests by a pipe of announcements."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

BOUND_S = 60.0


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def children(pid: int) -> list[int]:
    """Process ids of a process's children, whichever of its threads started them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for threads_own in lists for child in threads_own.read_text().split()]


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Process:
    """`python -m stepahead.SERVICE`, or a module in its place, with its announcements and its log."""

    def __init__(self, service: str, arguments: list[str], log: Path) -> None:
        self.log_path = log
        read_fd, write_fd = os.pipe()
        module = service if "." in service else f"stepahead.{service}"
        command = [sys.executable, "-m", module, *arguments, "--announce-fd", str(write_fd)]
        with log.open("wb") as stderr:
            self.popen = subprocess.Popen(command, stdout=stderr, stderr=stderr, pass_fds=[write_fd])
        os.close(write_fd)
        self._announcements = os.fdopen(read_fd)
        self.address = ""

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    async def announced(self, event: str) -> dict[str, Any]:
        """Reads announcements up to one of a kind."""
        while True:
            line = await asyncio.wait_for(asyncio.to_thread(self._announcements.readline), BOUND_S)
            assert line, f"the process ended before it announced {event}:\n{self.log}"
            told: dict[str, Any] = json.loads(line)
            if told["event"] == "listening":
                self.address = told["address"]
            if told["event"] == event:
                return told

    def send_signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    async def wait(self) -> int:
        """The exit code."""
        return await asyncio.wait_for(asyncio.to_thread(self.popen.wait), BOUND_S)

    async def kill(self) -> None:
        """Ends the process as a power cut would."""
        self.popen.kill()
        await self.wait()

    async def close(self) -> None:
        await self.kill()
        self._announcements.close()


@asynccontextmanager
async def run(service: str, *arguments: str, log: Path, until: str = "ready") -> AsyncIterator[Process]:
    """A process that has announced `until`."""
    process = Process(service, list(arguments), log)
    try:
        await process.announced(until)
        yield process
    finally:
        await process.close()


def worker_arguments(model: str, *, listen: str = "127.0.0.1:0", resume_grace_s: float = 0.5) -> list[str]:
    """Flags of a small worker whose death is noticed soon."""
    return [
        *("--model", model, "--listen", listen, "--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
        *("--block-size", "4", "--num-kv-blocks", "256", "--max-model-len", "512"),
        *("--resume-grace", str(resume_grace_s)),
    ]
