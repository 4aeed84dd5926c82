"""A Multiplex stream that breaks: requests go on where they were, each in its own way (D9, P4)."""

import grpc
import pytest

from stepahead.client import AsyncClient, InternalError, NotFoundError, RequestCancelledError, UnavailableError
from stepahead.client.reattaching import is_transport_fault
from stepahead.v1 import generation_pb2
from tests.client.fake_server import WAIT_S, FakeServer, choice_finished, delta, finished, retry_status, started
from tests.client.test_client_multiplex import columns, multiplex_response, read_until_ended


class Calls:
    """What arrives on each Multiplex call, and a script per call; a script that returns breaks the connection."""

    def __init__(self, fake: FakeServer, *scripts) -> None:
        self.commands: list[list[generation_pb2.MultiplexRequest]] = []
        self._scripts = iter(scripts)
        self._fake = fake
        fake.multiplex = self._serve

    def _serve(self, commands, context):
        arrived: list[generation_pb2.MultiplexRequest] = []
        self.commands.append(arrived)

        def take(count: int = 1):
            arrived.extend(next(commands) for _ in range(count))
            return arrived[-count:]

        yield from next(self._scripts)(take)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def failure(handle, code: grpc.StatusCode):
    return multiplex_response(failures=[generation_pb2.RequestFailed(handle=handle, status=retry_status(code, 0))])


def end(handle, first, ids, total):
    return (handle, [delta(first, ids), choice_finished(total), finished(total)])


async def test_d9_started_requests_attach_and_the_others_are_submitted_again(fake: FakeServer):
    def first(take):
        (one, two) = (each.submit.handle for each in take(2))
        yield multiplex_response(events=[(one, [started("a")])])
        yield multiplex_response(columns([one], [0], [10]))
        yield multiplex_response(columns([one], [1], [11, 12], [2]))
        assert two

    def second(take):
        again, other = take(2)
        yield multiplex_response(events=[(again.attach.handle, [started("a")])])
        yield multiplex_response(columns([again.attach.handle], [3], [13]))
        yield multiplex_response(
            events=[
                (again.attach.handle, [choice_finished(4), finished(4)]),
                (other.submit.handle, [started("b"), *end(0, 0, [20], 1)[1]]),
            ]
        )
        fake.call_ended.wait(WAIT_S)

    calls = Calls(fake, first, second)
    told = []
    async with (
        AsyncClient(fake.address, on_connection_change=told.append) as client,
        client.multiplex() as session,
    ):
        one = await session.submit("one", request_id="a", text=False, reattach_window=20)
        two = await session.submit("two")
        ends = {each.handle: each.completion for each in await read_until_ended(session, 2) if each.ended}
    assert (ends[one].token_ids, ends[two].token_ids) == ((10, 11, 12, 13), (20,))
    attach, submit = calls.commands[1]
    assert (attach.attach.request.request_id, list(attach.attach.request.next_token_indexes)) == ("a", [3])
    assert submit == calls.commands[0][1], "the same id with the same body is the same request"
    assert submit.submit.request.request_id
    assert [(each.is_lost, each.request_id) for each in told] == [(True, ""), (False, "")]
    assert 25 < told[0].seconds_left <= 30
    assert fake.cancelled_ids == []


async def test_a_request_that_the_server_lost_ends_with_what_broke_its_stream(fake: FakeServer):
    def first(take):
        yield multiplex_response(events=[(take()[0].submit.handle, [started("a"), delta(0, [1])])])

    def second(take):
        yield failure(take()[0].attach.handle, grpc.StatusCode.NOT_FOUND)
        fake.call_ended.wait(WAIT_S)

    Calls(fake, first, second)
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        await session.submit("one")
        error = (await read_until_ended(session, 1))[-1].error
    assert isinstance(error, UnavailableError)
    assert not isinstance(error, NotFoundError)


async def test_a_request_without_a_window_ends_and_the_others_go_on(fake: FakeServer):
    def first(take):
        take(2)
        yield multiplex_response(events=[(1, [started("a")]), (2, [started("b")])])

    def second(take):
        handle = take()[0].attach.handle
        yield multiplex_response(events=[(handle, [started("b")]), end(handle, 0, [5], 1)])
        fake.call_ended.wait(WAIT_S)

    calls = Calls(fake, first, second)
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        lost = await session.submit("one", reattach_window=0)
        kept = await session.submit("two")
        ends = {each.handle: each for each in await read_until_ended(session, 2) if each.ended}
    assert isinstance(ends[lost].error, UnavailableError)
    assert ends[kept].completion.token_ids == (5,)
    assert len(calls.commands[1]) == 1


async def test_f1_a_cancel_that_was_lost_is_sent_again(fake: FakeServer):
    def first(take):
        yield multiplex_response(events=[(take()[0].submit.handle, [started("a"), delta(0, [1])])])
        take()

    def second(take):
        attach, cancel = take(2)
        assert list(cancel.cancel.handles) == [attach.attach.handle]
        yield failure(attach.attach.handle, grpc.StatusCode.CANCELLED)
        fake.call_ended.wait(WAIT_S)

    Calls(fake, first, second)
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        handle = await session.submit("one")
        assert (await session.read())[0].started
        await session.cancel([handle])
        updates = await session.read()
    assert isinstance(updates[0].error, RequestCancelledError)


async def test_f6_leaving_cancels_what_would_outlive_the_stream(fake: FakeServer):
    def only(take):
        take(2)
        yield multiplex_response(events=[(1, [started("a")]), (2, [started("b")])])
        fake.call_ended.wait(WAIT_S)

    Calls(fake, only)
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        await session.submit("one", request_id="a")
        await session.submit("two", request_id="b", reattach_window=0)
        await session.read()
    assert fake.cancelled_ids == ["a"]


@pytest.mark.parametrize("window", [0, 0.2])
async def test_a_break_that_lasts_raises_its_error(fake: FakeServer, window):
    def breaking(take):
        yield multiplex_response(events=[(take()[0].submit.handle, [started("a")])])

    def again(take):
        take()
        yield multiplex_response(events=[(1, [started("a")])])

    calls = Calls(fake, breaking, *[again] * 20)
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        await session.submit("one", reattach_window=window)
        with pytest.raises(UnavailableError, match="Socket closed"):
            await read_until_ended(session, 1)
    assert (len(calls.commands) > 1) is (window > 0)
    assert len(calls.commands) < 6, "Started alone is no news"


@pytest.mark.parametrize(
    ("message", "is_break"),
    [("Received RST_STREAM with error code 2", True), ("Internal error from Core", True), ("assertion", False)],
)
def test_a_write_that_fails_first_hides_how_the_stream_ended(message, is_break):
    assert is_transport_fault(InternalError(message, code="INTERNAL")) is is_break
