"""Workers that come and go behind a name, without a word to the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from stepahead.scheduler import cluster
from stepahead.scheduler.worker_names import WorkerName
from tests.e2e.stack import Answer, Stack, eventually, fold, read_events, request, serve_scheduler, serve_worker

pytestmark = pytest.mark.e2e

NAME = "dns://worker:50061"


class Directory:
    """A name server of one name."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self.answers = True
        self.num_asked = 0

    async def resolve(self, name: WorkerName) -> frozenset[str]:
        assert str(name) == NAME
        self.num_asked += 1
        if not self.answers:
            raise OSError("nobody answers")
        return frozenset(self.addresses)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Directory:
    directory = Directory()
    monkeypatch.setattr(cluster, "resolve", directory.resolve)
    return directory


@asynccontextmanager
async def serve(*workers: str) -> AsyncIterator[Stack]:
    async with serve_scheduler(*workers, resolve_interval_s=0.05) as stack:
        yield stack


def connected(stack: Stack) -> set[str]:
    return {link.address for link in stack.server.engine.links.values()}


def known(stack: Stack) -> set[str]:
    return {link.address for link in stack.server.cluster.links}


async def asked_again(directory: Directory) -> None:
    """Waits until a whole further answer has been applied."""
    seen = directory.num_asked
    await eventually(lambda: directory.num_asked >= seen + 2)


async def test_every_replica_serves_and_new_ones_are_found(directory: Directory) -> None:
    async with serve_worker("toy:tagged") as one, serve_worker("toy:tagged") as two, serve(NAME) as stack:
        refused = await stack.generate([1], 1)
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        directory.addresses = {one.address}
        await eventually(lambda: connected(stack) == {one.address})
        expected = await stack.generate([1, 2, 3], 20)
        directory.addresses = {one.address, two.address}
        await eventually(lambda: connected(stack) == {one.address, two.address})
        answers = await stack.answers([request([1, 2, 3], 20) for _ in range(8)])
        assert [answer.token_ids for answer in answers] == [expected.token_ids] * 8
        status = await stack.status()
        assert {worker.address for worker in status.workers} == {one.address, two.address}
        assert all(worker.steps.boundaries for worker in status.workers)


async def test_a_worker_without_a_name_ends_what_it_runs(directory: Directory) -> None:
    """Its session goes on until it ends; then it is forgotten, and its lane with it."""
    async with serve_worker("toy:tagged") as stays, serve(NAME) as stack:
        async with serve_worker("toy:tagged", step_s=0.01) as goes:
            directory.addresses = {goes.address}
            await eventually(lambda: connected(stack) == {goes.address})
            call, answer = stack.open(request([1, 2, 3], 60)), Answer()
            await read_events(call, "delta", answer)
            directory.addresses = {stays.address}
            await eventually(lambda: connected(stack) == {goes.address, stays.address})
            await asked_again(directory)
            await fold(call, answer)
            assert (answer.ok, len(answer.token_ids), goes.address in known(stack)) == (True, 60, True)
            call, moved = stack.open(request([1, 2, 3], 60)), Answer()
            await read_events(call, "delta", moved)
        # The worker has ended: what it ran goes on where there is a name, and nobody dials it again.
        await fold(call, moved)
        assert (moved.ok, moved.token_ids) == (True, answer.token_ids)
        await eventually(lambda: known(stack) == connected(stack) == {stays.address})
        await stack.assert_quiescent()


async def test_a_worker_that_is_named_again_was_never_gone(directory: Directory) -> None:
    async with serve_worker("toy:tagged") as worker, serve(NAME) as stack:
        directory.addresses = {worker.address}
        await eventually(lambda: connected(stack) == {worker.address})
        (link,) = stack.server.cluster.links
        epoch = link.worker_epoch
        directory.addresses = set()
        await eventually(lambda: link.is_retired)
        directory.addresses = {worker.address}
        await eventually(lambda: not link.is_retired)
        assert (await stack.generate([1, 2], 5)).ok
        assert (stack.server.cluster.links, link.worker_epoch) == ([link], epoch)


async def test_a_silent_name_server_changes_nothing(directory: Directory) -> None:
    async with serve_worker("toy:tagged") as worker, serve(NAME) as stack:
        directory.addresses = {worker.address}
        await eventually(lambda: connected(stack) == {worker.address})
        directory.answers, directory.addresses = False, set()
        await asked_again(directory)
        assert not stack.server.cluster.links[0].is_retired
        assert (await stack.generate([1, 2], 5)).ok


async def test_an_address_that_never_answered_is_let_go(directory: Directory) -> None:
    """A link that is dialling or waiting to dial again ends at once."""
    async with serve(NAME) as stack:
        directory.addresses = {"127.0.0.1:1", "127.0.0.1:2"}
        await eventually(lambda: known(stack) == directory.addresses)
        directory.addresses = {"127.0.0.1:2"}
        await eventually(lambda: known(stack) == directory.addresses)


async def test_a_link_that_ends_as_its_address_comes_back_is_dialled_again(directory: Directory) -> None:
    async with serve_worker("toy:tagged") as worker, serve(NAME) as stack:
        directory.addresses = {"127.0.0.1:1"}
        await eventually(lambda: known(stack) == {"127.0.0.1:1"})
        (old,) = stack.server.cluster.links
        # The link has decided to end, and before anybody has noticed its name is back.
        old.retire(retired=True)
        await eventually(lambda: known(stack) == {"127.0.0.1:1"} and stack.server.cluster.links != [old])
        directory.addresses |= {worker.address}
        await eventually(lambda: connected(stack) == {worker.address})


async def test_names_and_addresses_are_one_set(directory: Directory) -> None:
    """A worker that is configured and named is dialled once, and stays when the name goes."""
    async with serve_worker("toy:tagged") as worker, serve(worker.address, NAME) as stack:
        directory.addresses = {worker.address}
        await asked_again(directory)
        await eventually(lambda: connected(stack) == {worker.address})
        directory.addresses = set()
        await asked_again(directory)
        assert [(link.address, link.is_retired) for link in stack.server.cluster.links] == [(worker.address, False)]


async def test_stopping_stops_asking(directory: Directory) -> None:
    async with serve(NAME) as stack:
        await asked_again(directory)
    asked = directory.num_asked
    await asyncio.sleep(0.2)
    assert (directory.num_asked, stack.server.cluster.links) == (asked, [])
