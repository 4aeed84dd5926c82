"""Names that stand for workers: what is one, and what it resolves to."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import click
import pytest
from click.testing import CliRunner

from stepahead.scheduler import settings
from stepahead.scheduler.worker_names import WorkerName, parse_worker, resolve


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("10.0.0.1:50061", "10.0.0.1:50061"),
        ("worker:50061", "worker:50061"),
        ("unix:/run/worker.sock", "unix:/run/worker.sock"),
        ("dns://worker:50061", WorkerName("worker", 50061)),
        ("dns:///worker.default.svc:1", WorkerName("worker.default.svc", 1)),
        ("dns:worker:65535", WorkerName("worker", 65535)),
    ],
)
def test_what_is_a_name(text: str, parsed: WorkerName | str) -> None:
    assert parse_worker(text) == parsed


@pytest.mark.parametrize(
    "text",
    ["dns://worker", "dns://:1", "dns://worker:0", "dns://worker:65536", "dns://8.8.8.8/worker:1", "dns://w:x"],
)
def test_what_is_none(text: str) -> None:
    """Refused by the field's name, before anything is dialled."""
    with pytest.raises(ValueError, match="is not dns://HOST:PORT"):
        parse_worker(text)

    @click.command()
    @settings.options
    def command(**values: object) -> None:
        settings.from_options(values)

    result = CliRunner().invoke(command, ["--worker", text])
    assert result.exit_code == 2
    assert "--worker" in result.output


def test_a_name_says_how_it_was_written() -> None:
    assert str(WorkerName("worker", 7)) == "dns://worker:7"


async def answering(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[socket.AddressFamily, list[tuple[Any, ...]]]
) -> frozenset[str]:
    """What a name resolves to, given the answers by address family."""

    async def getaddrinfo(host: str, port: int, *, family: socket.AddressFamily, type: int) -> Any:  # noqa: A002
        assert (host, port, type) == ("worker", 50061, socket.SOCK_STREAM)
        if family not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(family, type, 6, "", address) for address in addresses[family]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return await resolve(WorkerName("worker", 50061))


async def test_every_replica_once(monkeypatch: pytest.MonkeyPatch) -> None:
    v4 = [("10.0.0.2", 50061), ("10.0.0.3", 50061), ("10.0.0.2", 50061)]
    found = await answering(monkeypatch, {socket.AF_INET: v4, socket.AF_INET6: [("fd00::2", 50061, 0, 0)]})
    assert found == {"10.0.0.2:50061", "10.0.0.3:50061"}


async def test_ipv6_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await answering(monkeypatch, {socket.AF_INET6: [("fd00::2", 50061, 0, 0)]}) == {"[fd00::2]:50061"}


async def test_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="unknown"):
        await answering(monkeypatch, {})


async def test_this_machine_has_a_name() -> None:
    assert await resolve(WorkerName("localhost", 7)) == {"127.0.0.1:7"}
