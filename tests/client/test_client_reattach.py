"""Streams that break: what is asked for next, what is dropped, when it is given up (D9, P3)."""

import asyncio
import threading
from itertools import count

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from stepahead.client import (
    AsyncClient,
    Client,
    DeadlineError,
    InternalError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    UnavailableError,
)
from stepahead.client.reattaching import Reattachment
from stepahead.v1 import generation_pb2
from tests.client.fake_server import (
    WAIT_S,
    FakeServer,
    broken,
    choice_finished,
    columns,
    delta,
    failing,
    finished,
    packed,
    prompt_logprobs,
    response,
    started,
)


def rest(*events):
    return generation_pb2.AttachResponse(events=[started(), *events])


def answers(*scripts):
    """Each Attach gets the next script: a list of messages, then the end or a broken connection."""
    calls = count()

    def script(request, context):
        messages, ends = scripts[next(calls)]
        yield from messages
        if not ends:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return script


def asked(fake: FakeServer):
    return [list(each.next_token_indexes) for each in fake.attaches]


def test_d9_a_broken_stream_goes_on_where_it_was(call, fake: FakeServer):
    fake.generate = broken(response(started(), delta(0, [1], "a")), response(delta(1, [2], "b")))
    fake.attach = answers(
        ([rest(), rest(delta(2, [3], "c"))], False),
        ([], False),
        ([rest(delta(3, [4], "d"), choice_finished(4), finished(4))], True),
    )
    deltas, completion = call.read("hi", request_id="mine")
    assert [(each.first_token_index, each.text) for each in deltas] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert (completion.text, completion.token_ids) == ("abcd", (1, 2, 3, 4))
    assert asked(fake) == [[2], [3], [3]]
    assert {each.request_id for each in fake.attaches} == {"mine"} == {fake.requests[0].request_id}
    assert len(fake.requests) == 1
    assert fake.cancelled_ids == []


def test_a_choice_that_had_ended_is_not_told_twice(call, fake: FakeServer):
    fake.generate = broken(
        response(started(), delta(0, [1], "a"), delta(0, [7, 8], "x", choice=1)),
        response(delta(2, [], "y", choice=1), choice_finished(2, choice=1)),
    )
    fake.attach = answers(
        (
            [
                rest(delta(2, [], "y", choice=1), choice_finished(2, choice=1)),
                rest(delta(1, [2], "b"), choice_finished(2), finished(4)),
            ],
            True,
        )
    )
    deltas, completion = call.read("hi", num_choices=2)
    assert asked(fake) == [[1, 2]]
    assert [(each.choice_index, each.text) for each in deltas] == [(0, "a"), (1, "x"), (1, "y"), (0, "b")]
    assert [each.text for each in completion.choices] == ["ab", "xy"]


def test_without_token_ids_the_newest_delta_comes_again_and_is_dropped(call, fake: FakeServer):
    """Only the server knows how many tokens a delta stands for; two breaks within one delta add up."""
    fake.generate = broken(response(started(), delta(0, [], "ab")), response(delta(2, [], "cd")))
    fake.attach = answers(
        ([rest(delta(2, [], "cdef"))], False),
        ([rest(delta(2, [], "cdefgh"), choice_finished(6), finished(6))], True),
    )
    deltas, completion = call.read("hi", token_ids=False)
    assert asked(fake) == [[2], [2]]
    assert [each.text for each in deltas] == ["ab", "cd", "ef", "gh"]
    assert (completion.text, completion.choices[0].output_tokens) == ("abcdefgh", 6)


def test_log_probabilities_go_on_too(call, fake: FakeServer):
    entries = [(-0.5, 1, [(index, -0.5)]) for index in range(4)]
    fake.generate = broken(
        response(started(), prompt_logprobs(1, entries[0], entries[1])),
        response(prompt_logprobs(3, entries[2])),
    )
    fake.attach = answers(
        ([rest(prompt_logprobs(1, *entries[:3]), delta(0, [1], "a", logprobs=columns(entries[1])))], False),
        ([rest(delta(1, [2], "b", logprobs=columns(entries[2])), choice_finished(2), finished(2))], True),
    )
    _, completion = call.read([5, 6, 7, 8], logprobs=1, prompt_logprobs=1)
    assert asked(fake) == [[0], [1]]
    prompt = completion.prompt_logprobs
    assert prompt[0] is None
    assert [(each.token_id, each.top) for each in prompt[1:]] == [
        (6, ((0, -0.5),)),
        (7, ((1, -0.5),)),
        (8, ((2, -0.5),)),
    ]
    assert [(each.token_id, each.top) for each in completion.logprobs] == [(1, ((1, -0.5),)), (2, ((2, -0.5),))]


def test_b11_a_gap_after_a_break_is_a_protocol_error(call, fake: FakeServer):
    fake.generate = broken(response(started(), delta(0, [1])))
    fake.attach = answers(([rest(delta(2, [3]))], True))
    with pytest.raises(ProtocolError, match="continued at token 2, expected 1"):
        call("generate", "hi", request_id="mine")
    assert fake.cancelled_ids == ["mine"]


def test_an_end_whose_status_is_lost_is_an_end(call, fake: FakeServer):
    fake.generate = broken(response(started(), delta(0, [1], "a"), choice_finished(1), finished(1)))
    assert call("generate", "hi").text == "a"
    assert fake.attaches == []


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT]
)
def test_a_server_that_does_not_know_the_request_ends_it_with_the_first_error(call, fake: FakeServer, code):
    fake.generate = broken(response(started(), delta(0, [1])))
    fake.attach = lambda request, context: context.abort(code, "what request?")
    with pytest.raises(UnavailableError, match="Socket closed") as caught:
        call("generate", "hi")
    assert caught.value.__cause__ is not None
    assert len(fake.attaches) == 1


def test_a_request_that_may_not_be_accepted_is_tried_once(call, fake: FakeServer):
    fake.generate = broken()
    fake.attach = answers(([], False))
    with pytest.raises(UnavailableError):
        call("generate", "hi")
    assert asked(fake) == [[0]]


def test_the_servers_own_errors_and_a_window_of_0_are_final(call, fake: FakeServer):
    info = error_details_pb2.ErrorInfo(reason="WORKER_LOST", domain="stepahead")
    lost = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="lost", details=packed(info))
    fake.generate = failing(lost, response(started(), delta(0, [1])))
    with pytest.raises(UnavailableError, match="lost"):
        call("generate", "hi")
    fake.generate = broken(response(started(), delta(0, [1])))
    with pytest.raises(UnavailableError, match="Socket closed"):
        call("generate", "hi", reattach_window=0)
    assert fake.attaches == []
    assert fake.cancelled_ids == []


def test_a_failure_on_this_side_cancels_what_goes_on(call, fake: FakeServer):
    too_big = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="message too big")
    fake.generate = failing(too_big, response(started()))
    with pytest.raises(OverloadedError):
        call("generate", "hi", request_id="mine")
    assert fake.cancelled_ids == ["mine"]


def test_the_timeout_bounds_all_tries_together(call, fake: FakeServer):
    fake.generate = broken(response(started(), delta(0, [1])))
    fake.attach = lambda request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    with pytest.raises(DeadlineError):
        call("generate", "hi", timeout=0.25)
    assert len(fake.attaches) > 1


def test_f6_leaving_early_cancels_by_id(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    with Client(fake.address) as client, client.stream("hi") as stream:
        next(stream)
        request_id = stream.request_id
    assert fake.cancelled_ids == [request_id] == [fake.requests[0].request_id]


async def test_f6_leaving_early_cancels_by_id_async(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    async with AsyncClient(fake.address) as client:
        async with client.stream("hi") as stream:
            await anext(stream)
        assert fake.cancelled_ids == [stream.request_id]
        async with client.stream("hi", reattach_window=0) as stream:
            await anext(stream)
        assert len(fake.cancelled_ids) == 1


def test_closing_the_client_cancels_what_still_runs(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    client = Client(fake.address)
    with client.stream("hi", request_id="mine") as stream:
        next(stream)
        client.close()
        with pytest.raises(RequestCancelledError):
            next(stream)
    assert fake.cancelled_ids == ["mine"]


async def test_closing_the_client_cancels_what_still_runs_async(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    client = AsyncClient(fake.address)
    async with client.stream("hi", request_id="mine") as stream:
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(RequestCancelledError):
            await reading
    assert fake.cancelled_ids == ["mine"]


@pytest.fixture
def waiting(fake: FakeServer) -> threading.Event:
    """A server that breaks streams for ever; set once the client waits for its second try or later."""
    event = threading.Event()

    def refuse(request, context):
        if len(fake.attaches) > 1:
            event.set()
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    fake.generate = broken(response(started(), delta(0, [1])))
    fake.attach = refuse
    return event


def test_cancel_ends_the_tries(fake: FakeServer, waiting: threading.Event):
    with Client(fake.address) as client, client.stream("hi", request_id="mine") as stream:
        next(stream)
        threading.Thread(target=lambda: (waiting.wait(WAIT_S), stream.cancel())).start()
        with pytest.raises(RequestCancelledError):
            next(stream)
    assert fake.cancelled_ids == ["mine"]


async def test_cancel_ends_the_tries_async(fake: FakeServer, waiting: threading.Event):
    async with AsyncClient(fake.address) as client, client.stream("hi", request_id="mine") as stream:
        await anext(stream)
        tries = asyncio.create_task(anext(stream))
        assert await asyncio.to_thread(waiting.wait, WAIT_S)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            await tries
    assert fake.cancelled_ids == ["mine"]


LOST = UnavailableError("Socket closed", code="UNAVAILABLE")


def test_tries_back_off_until_the_window_is_over():
    reattachment = Reattachment(5.0)
    reattachment.note_answer(is_news=True)
    now_s = 100.0
    for expected_s in (0.0, 0.1, 0.2, 0.4, 0.8, 1.6):
        assert reattachment.delay_after(LOST, now_s) == expected_s
        now_s += expected_s
    with pytest.raises(UnavailableError) as caught:
        reattachment.delay_after(UnavailableError("still", code="UNAVAILABLE"), now_s)
    assert caught.value is LOST


def test_news_ends_a_break_and_repeats_do_not():
    reattachment = Reattachment(5.0)
    reattachment.note_answer(is_news=True)
    assert [reattachment.delay_after(LOST, 0.0) for _ in range(2)] == [0.0, 0.1]
    reattachment.note_answer(is_news=False)
    assert reattachment.delay_after(LOST, 4.0) == 0.2
    reattachment.note_answer(is_news=True)
    assert reattachment.delay_after(LOST, 40.0) == 0.0


@pytest.mark.parametrize(("text", "goes_on"), [("Received RST_STREAM with error code 2", True), ("a bug", False)])
def test_a_stream_reset_by_a_proxy_is_a_lost_connection(text: str, goes_on: bool):
    reattachment = Reattachment(5.0)
    reattachment.note_answer(is_news=True)
    error = InternalError(text, code="INTERNAL")
    if goes_on:
        assert reattachment.delay_after(error, 0.0) == 0.0
    else:
        with pytest.raises(InternalError):
            reattachment.delay_after(error, 0.0)
