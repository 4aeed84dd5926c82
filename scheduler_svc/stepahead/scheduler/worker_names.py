"""Names that stand for all the workers behind them: `dns://HOST:PORT`, resolved again and again.

Compose and headless Kubernetes services answer such a name with one address per replica, so workers come and go
without a word to the scheduler.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from typing_extensions import override

PREFIX = "dns:"


@dataclass(frozen=True, slots=True)
class WorkerName:
    """A host name and the port of every worker behind it."""

    host: str
    port: int

    @override
    def __str__(self) -> str:
        return f"dns://{self.host}:{self.port}"


def parse_worker(text: str) -> WorkerName | str:
    """A worker as configured: a name for `dns://HOST:PORT` (or gRPC's `dns:///HOST:PORT`), else the address itself.

    Raises:
        ValueError: it begins like a name and is none.
    """
    if not text.startswith(PREFIX):
        return text
    rest = text.removeprefix(PREFIX)
    # Two slashes and a third one would name a DNS server in gRPC's spelling; there is none to choose here.
    target = rest.removeprefix("///") if rest.startswith("///") else rest.removeprefix("//")
    host, _, port = target.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{text!r} is not dns://HOST:PORT")
    return WorkerName(host, int(port))


async def resolve(name: WorkerName) -> frozenset[str]:
    """HOST:PORT of every worker behind a name now.

    IPv6 counts only where there is no IPv4: a replica with both would be dialled twice, and the second session
    would take the worker from the first.

    Raises:
        OSError: the name has no address, or nobody answers.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name.host, name.port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror:
        found = await loop.getaddrinfo(name.host, name.port, family=socket.AF_INET6, type=socket.SOCK_STREAM)
    hosts = [str(address[0]) for _, _, _, _, address in found]
    return frozenset(f"[{host}]:{name.port}" if ":" in host else f"{host}:{name.port}" for host in hosts)
