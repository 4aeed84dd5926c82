"""Many requests over one stream."""

import asyncio

import pytest

from stepahead.client import (
    AsyncClient,
    InvalidRequestError,
    ProtocolError,
    RequestCancelledError,
    UnavailableError,
)
from stepahead.v1 import generation_pb2
from tests.client.fake_server import (
    WAIT_S,
    FakeServer,
    choice_finished,
    delta,
    finished,
    started,
    violation,
)


def multiplex_response(tokens=None, events=(), failures=()):
    return generation_pb2.MultiplexResponse(
        tokens=tokens,
        events=[generation_pb2.RequestEvents(handle=handle, events=each) for handle, each in events],
        failures=failures,
    )


def columns(handles, firsts, ids, counts=()):
    return generation_pb2.TokenColumns(
        handles=handles, first_token_indexes=firsts, token_counts=counts, token_ids=ids
    )


def submits(commands, count):
    return [next(commands).submit for _ in range(count)]


async def read_until_ended(session, count):
    updates, ended = [], 0
    async for update in session:
        updates.append(update)
        ended += update.ended
        if ended == count:
            return updates
    raise AssertionError("the session ended early")


async def test_columns_and_events_fold_into_completions(fake: FakeServer):
    def script(commands, context):
        first, second = (each.handle for each in submits(commands, 2))
        yield multiplex_response(events=[(first, [started("a")]), (second, [started("b")])])
        yield multiplex_response(columns([first, second], [0, 0], [10, 20]))
        yield multiplex_response(columns([second, first], [1, 1], [21, 22, 11], [2, 1]))
        yield multiplex_response(columns([first], [2], [12]), events=[(first, [choice_finished(3), finished(3)])])
        yield multiplex_response(events=[(second, [choice_finished(3), finished(3)])])
        fake.call_ended.wait(WAIT_S)

    fake.multiplex = script
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        first = await session.submit("one", text=False)
        second = await session.submit([1, 2], text=False)
        assert session.num_live == 2
        updates = await read_until_ended(session, 2)
        assert session.num_live == 0
    completions = {each.handle: each.completion for each in updates if each.completion}
    assert completions[first].token_ids == (10, 11, 12)
    assert completions[second].token_ids == (20, 21, 22)
    assert completions[first].request_id == "a"
    assert [each.handle for each in updates if each.started] == [first, second]
    last = next(each for each in updates if each.completion is completions[first])
    assert [each.token_ids for each in last.deltas] == [(12,)]
    assert await asyncio.to_thread(fake.call_ended.wait, WAIT_S)


async def test_live_requests_are_counted_until_their_end_was_read(fake: FakeServer):
    def script(commands, context):
        handles = [each.handle for each in submits(commands, 3)]
        end = [choice_finished(0), finished(0)]
        yield multiplex_response(events=[(handle, [started(), *end]) for handle in handles])
        fake.call_ended.wait(WAIT_S)

    fake.multiplex = script
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        handles = [await session.submit("one") for _ in range(3)]
        counts = []
        async for update in session:
            assert update.ended
            counts.append((update.handle, session.num_live))
            if session.num_live == 0:
                break
    assert counts == list(zip(handles, [2, 1, 0], strict=True))


async def test_failure_ends_one_request_and_leaves_the_others(fake: FakeServer):
    def script(commands, context):
        bad, good = (each.handle for each in submits(commands, 2))
        failure = generation_pb2.RequestFailed(handle=bad, status=violation("stopping.max_tokens"))
        yield multiplex_response(failures=[failure])
        yield multiplex_response(events=[(good, [started(), delta(0, [1], "x"), choice_finished(1), finished(1)])])
        fake.call_ended.wait(WAIT_S)

    fake.multiplex = script
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        bad = await session.submit("one", max_tokens=0)
        good = await session.submit("two")
        updates = await read_until_ended(session, 2)
    by_handle = {each.handle: each for each in updates}
    assert isinstance(by_handle[bad].error, InvalidRequestError)
    assert by_handle[bad].error.field == "stopping.max_tokens"
    assert by_handle[good].completion.text == "x"


async def test_cancel_and_timeouts_travel_in_the_messages(fake: FakeServer):
    seen = []

    def script(commands, context):
        submit, other = submits(commands, 2)
        seen.extend([submit.request.scheduling.timeout_ms, other.request.scheduling.timeout_ms])
        seen.append(list(next(commands).cancel.handles))
        cancelled = violation("x")
        cancelled.code = 1
        failures = [generation_pb2.RequestFailed(handle=submit.handle, status=cancelled)]
        yield multiplex_response(failures=failures)
        fake.call_ended.wait(WAIT_S)

    fake.multiplex = script
    async with AsyncClient(fake.address, timeout=7.0) as client, client.multiplex() as session:
        handle = await session.submit("one")
        await session.submit("two", timeout=0.5)
        await session.cancel([handle])
        updates = await session.read()
    assert [type(each.error) for each in updates] == [RequestCancelledError]
    assert seen == [7000, 500, [handle]]


async def test_b11_gap_in_columns_is_a_protocol_error(fake: FakeServer):
    def script(commands, context):
        (submit,) = submits(commands, 1)
        yield multiplex_response(events=[(submit.handle, [started()])])
        yield multiplex_response(columns([submit.handle], [1], [5]))
        fake.call_ended.wait(WAIT_S)

    fake.multiplex = script
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        await session.submit("one")
        with pytest.raises(ProtocolError, match="continued at token 1"):
            await read_until_ended(session, 1)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda handle: multiplex_response(columns([handle], [0], [1, 2])), "different lengths"),
        (lambda handle: multiplex_response(columns([handle + 1], [0], [1])), "not live"),
    ],
)
async def test_malformed_columns_are_a_protocol_error(fake: FakeServer, bad, text):
    def script(commands, context):
        (submit,) = submits(commands, 1)
        yield multiplex_response(events=[(submit.handle, [started()])])
        yield bad(submit.handle)
        fake.call_ended.wait(WAIT_S)

    fake.multiplex = script
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        await session.submit("one")
        with pytest.raises(ProtocolError, match=text):
            await read_until_ended(session, 1)


async def test_stream_that_ends_with_live_requests_is_a_protocol_error(fake: FakeServer):
    def script(commands, context):
        submits(commands, 1)
        return iter(())

    fake.multiplex = script
    async with AsyncClient(fake.address) as client, client.multiplex() as session:
        await session.submit("one")
        with pytest.raises(ProtocolError, match="while 1 requests had not"):
            await session.read()


async def test_session_without_server_raises_for_the_reader_and_not_for_the_writer():
    async with AsyncClient("127.0.0.1:1") as client, client.multiplex() as session:
        await session.submit("one")
        with pytest.raises(UnavailableError):
            await session.read()
