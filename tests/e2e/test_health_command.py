"""`stepahead health`: what containers ask."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import CliRunner, Result

from stepahead.cli.main import main
from tests.e2e.stack import serve_scheduler, serve_worker

pytestmark = pytest.mark.e2e


async def ask(address: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["health", "--address", address, "--timeout", "10"])


async def test_a_service_that_takes_work_and_one_that_does_not() -> None:
    async with serve_worker("toy:tagged") as worker, serve_scheduler("127.0.0.1:1") as stack:
        # The services log to the same stream here, so the answer is one line among others.
        serving = await ask(worker.address)
        assert (serving.exit_code, "serving" in serving.stdout.splitlines()) == (0, True)
        without_worker = await ask(stack.server.address)
        assert (without_worker.exit_code, "not serving" in without_worker.stdout.splitlines()) == (3, True)


async def test_nobody_there() -> None:
    result = await ask("127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "error: no health at 127.0.0.1:1: UNAVAILABLE\n"
