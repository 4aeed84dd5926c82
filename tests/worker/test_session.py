"""Ownership rules on a clock of the test's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepahead.v1 import worker_pb2
from stepahead.worker.errors import SessionRefused
from stepahead.worker.session import SessionRegistry
from stepahead.worker.step_stream import StepStream

GRACE_NS = 100


@pytest.fixture
async def streams() -> list[StepStream]:
    return [StepStream(asyncio.get_running_loop()) for _ in range(4)]


def request(**fields: Any) -> worker_pb2.OpenSession:
    both: dict[str, Any] = {"scheduler_instance_id": "a", "scheduler_epoch": 1, "stream_generation": 1}
    return worker_pb2.OpenSession(**(both | fields))


async def test_a_lease_ends_exactly_grace_after_the_stream(streams: list[StepStream]) -> None:
    registry = SessionRegistry(GRACE_NS)
    session, replaced = registry.open(request(), streams[0], 0)
    assert replaced is None
    assert registry.stream_ended(streams[0], 1000) is session
    assert not registry.expire(session, 1099)
    with pytest.raises(SessionRefused) as caught:
        registry.open(request(scheduler_instance_id="b"), streams[1], 1099)
    assert caught.value.reason == "WORKER_OWNED"
    other, _ = registry.open(request(scheduler_instance_id="b"), streams[1], 1100)
    assert other.worker_epoch == 2
    assert not registry.expire(session, 5000)
    assert registry.session is other


async def test_a_resume_stops_the_lease_from_running_out(streams: list[StepStream]) -> None:
    registry = SessionRegistry(GRACE_NS)
    session, _ = registry.open(request(), streams[0], 0)
    registry.stream_ended(streams[0], 0)
    resume = worker_pb2.SessionResume(session_id=session.session_id)
    resumed, replaced = registry.open(request(resume=resume, stream_generation=2), streams[1], 99)
    assert resumed is session
    assert replaced is None
    assert not registry.expire(session, 10_000)


async def test_the_end_of_a_replaced_stream_means_nothing(streams: list[StepStream]) -> None:
    registry = SessionRegistry(GRACE_NS)
    session, _ = registry.open(request(), streams[0], 0)
    resume = worker_pb2.SessionResume(session_id=session.session_id)
    _, replaced = registry.open(request(resume=resume, stream_generation=2), streams[1], 0)
    assert replaced is streams[0]
    assert registry.stream_ended(streams[0], 0) is None
    assert not registry.close(streams[0])
    assert registry.session is session


async def test_session_ids_are_not_guessed_from_one_another(streams: list[StepStream]) -> None:
    """A resume must not hit a session of another life of the worker by counting."""
    ids: set[int] = set()
    for _ in range(20):
        session, _ = SessionRegistry(GRACE_NS).open(request(), streams[0], 0)
        assert 1 <= session.session_id < 2**63
        ids.add(session.session_id)
    assert len(ids) == 20


async def test_an_epoch_is_used_once_even_after_the_session_was_closed(streams: list[StepStream]) -> None:
    registry = SessionRegistry(GRACE_NS)
    registry.open(request(scheduler_epoch=5), streams[0], 0)
    assert registry.close(streams[0])
    with pytest.raises(SessionRefused) as caught:
        registry.open(request(scheduler_epoch=5), streams[1], 0)
    assert caught.value.reason == "STALE_EPOCH"
    session, _ = registry.open(request(scheduler_epoch=6), streams[1], 0)
    assert session.worker_epoch == 2
