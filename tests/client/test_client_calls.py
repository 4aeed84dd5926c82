"""Both clients against a fake scheduler: answers, errors, cancellation on exit."""

import asyncio
import threading

import grpc
import pytest
from google.rpc import status_pb2

from stepahead.client import (
    AlreadyExistsError,
    AsyncClient,
    CancelOutcome,
    ChatMessage,
    Client,
    DeadlineError,
    FinishReason,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    SchedulerState,
    UnavailableError,
)
from stepahead.v1 import generation_pb2, operations_pb2
from tests.client.fake_server import (
    WAIT_S,
    FakeServer,
    choice_finished,
    delta,
    failing,
    finished,
    response,
    retry_status,
    started,
    violation,
)


def test_generate_returns_the_folded_request(call):
    completion = call("generate", "hi", request_id="mine")
    assert completion.text == "Small steps help"
    assert completion.token_ids == (1, 2, 3)
    assert completion.request_id == "mine"
    assert completion.finish_reason is FinishReason.STOP
    assert completion.matched == "."
    assert (completion.usage.prompt_tokens, completion.usage.output_tokens) == (3, 3)
    assert completion.timings.first_token_ns == 2_000_000
    assert completion.started.sampling.seed == 2**64 - 1


def test_stream_yields_deltas_in_order_and_then_the_same_completion(call):
    deltas, completion = call.read("hi")
    assert [(each.first_token_index, each.token_ids, each.text) for each in deltas] == [
        (0, (1,), "Small"),
        (1, (2, 3), " steps"),
        (3, (), " help"),
    ]
    assert completion.text == "".join(each.text for each in deltas)


def test_options_reach_the_server_and_unset_ones_stay_unset(call, fake: FakeServer):
    call("generate", [7, 8], max_tokens=4, temperature=0.0, top_k=-1, stop="x", seed=0, timeout=900.0)
    sent = fake.requests[0]
    assert list(sent.token_ids.ids) == [7, 8]
    assert sent.sampling.HasField("temperature")
    assert sent.sampling.temperature == 0
    assert sent.sampling.top_k == -1
    assert sent.sampling.HasField("seed")
    assert not sent.sampling.HasField("top_p")
    assert sent.stopping.max_tokens == 4
    assert list(sent.stopping.stop_strings) == ["x"]
    assert not sent.stopping.HasField("min_tokens")
    assert not sent.HasField("num_choices")
    # Every request carries its own timeout, one that outlives its call an id too.
    assert (sent.scheduling.timeout_ms, sent.scheduling.reattach_window_ms) == (900_000, 30_000)
    assert len(sent.request_id) == 32
    assert 0 < fake.deadlines_s[0] < 1000
    call("generate", "hi", timeout=900.0, reattach_window=0)
    sent = fake.requests[1]
    assert sent.scheduling.timeout_ms == 900_000
    assert not sent.scheduling.HasField("reattach_window_ms")
    assert sent.request_id == ""
    assert 0 < fake.deadlines_s[1] < 1000


def test_chat_sends_turns_from_values_and_from_mappings(call, fake: FakeServer):
    call("chat", [ChatMessage("system", "be brief"), {"role": "user", "content": "hi"}])
    assert [(turn.role, turn.content) for turn in fake.requests[0].chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]


def test_unary_calls_return_values(call, fake: FakeServer):
    assert call("cancel", ["live", "gone"]) == {
        "live": CancelOutcome.CANCELLED,
        "gone": CancelOutcome.NOT_FOUND,
    }
    model = call("get_model")
    assert (model.model, model.vocab_size, model.eos_token_ids, model.bos_token_id) == ("fake", 5, (4,), None)
    assert model.default_sampling.temperature == 1.0
    assert model.default_sampling.top_p is None
    assert call("tokenize", "ab") == (97, 98)
    assert call("tokenize", [ChatMessage("user", "b")]) == (98,)
    assert call("detokenize", (97, 98)) == "ab"
    status = call("status")
    assert status.state is SchedulerState.SERVING
    assert status.workers[0].steps.busy_ns == 2**40
    assert status.workers[0].steps.overlap_share == 0.75
    with pytest.raises(NotFoundError, match="no model other"):
        call("get_model", "other")


def test_bad_field_is_named(call, fake: FakeServer):
    fake.generate = failing(violation("sampling.top_p"))
    with pytest.raises(InvalidRequestError) as caught:
        call("generate", "hi")
    assert caught.value.field == "sampling.top_p"
    assert caught.value.reason == "BAD_FIELD"
    assert caught.value.metadata == {"limit": "8"}
    assert (caught.value.limit, caught.value.actual) == (8, None)
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, OverloadedError),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyExistsError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError),
        (grpc.StatusCode.CANCELLED, RequestCancelledError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
def test_status_after_output_becomes_a_typed_error_with_retry_delay(call, fake: FakeServer, code, error_class):
    fake.generate = failing(retry_status(code, 250), response(started(), delta(0, [1])))
    with pytest.raises(error_class) as caught:
        call("generate", "hi")
    assert caught.value.retry_delay_s == 0.25
    assert caught.value.message == "try later"
    assert caught.value.code == code.name


def test_status_without_details_keeps_its_text(call, fake: FakeServer):
    fake.generate = failing(status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message="incident 7"))
    with pytest.raises(InternalError, match="incident 7"):
        call("generate", "hi")


def test_nobody_listening_is_unavailable():
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError):
        client.generate("hi")


def test_deadline_ends_the_call(call, fake: FakeServer):
    fake.hang_after(response(started()))
    with pytest.raises(DeadlineError, match=r"^the 0\.2 s passed and the server did not answer; phase prefill$"):
        call("generate", "hi", timeout=0.2)
    assert fake.call_ended.wait(WAIT_S)


def test_b11_gap_in_token_indexes_is_a_protocol_error_and_cancels(call, fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1])), response(delta(2, [3])))
    with pytest.raises(ProtocolError, match="continued at token 2, expected 1"):
        call("generate", "hi")
    assert fake.call_ended.wait(WAIT_S)


def test_d8_ok_status_without_terminal_is_a_protocol_error(call, fake: FakeServer):
    fake.generate = lambda request, context: iter([response(started(), delta(0, [1]))])
    with pytest.raises(ProtocolError, match="without the end"):
        call("generate", "hi")


def test_f6_leaving_a_stream_early_cancels_on_the_server(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    with Client(fake.address) as client:
        with client.stream("hi") as stream:
            for each in stream:
                assert each.text == "a"
                break
            assert not fake.call_ended.is_set()
        assert fake.call_ended.wait(WAIT_S)
        assert list(stream) == []


async def test_f6_leaving_an_async_stream_early_cancels_on_the_server(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    async with AsyncClient(fake.address) as client:

        async def fail_while_reading() -> None:
            async with client.stream("hi") as stream:
                async for _ in stream:
                    raise KeyError("the caller's own trouble")

        with pytest.raises(KeyError):
            await fail_while_reading()
        assert await asyncio.to_thread(fake.call_ended.wait, WAIT_S)


async def test_f6_cancelling_the_task_cancels_on_the_server(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    async with AsyncClient(fake.address) as client:
        reached = asyncio.Event()

        async def read() -> None:
            async with client.stream("hi") as stream:
                async for _ in stream:
                    reached.set()

        task = asyncio.create_task(read())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.call_ended.wait, WAIT_S)


def test_cancel_from_another_thread_ends_the_iteration(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    with Client(fake.address) as client, client.stream("hi") as stream:
        next(stream)
        threading.Thread(target=stream.cancel).start()
        with pytest.raises(RequestCancelledError):
            next(stream)


async def test_cancel_from_another_task_ends_the_iteration(fake: FakeServer):
    fake.hang_after(response(started(), delta(0, [1], "a")))
    async with AsyncClient(fake.address) as client, client.stream("hi") as stream:
        await anext(stream)
        asyncio.get_running_loop().call_soon(stream.cancel)
        with pytest.raises(RequestCancelledError):
            await anext(stream)


def test_stream_outside_of_with_is_refused(fake: FakeServer):
    with Client(fake.address) as client, pytest.raises(RuntimeError, match="with statement"):
        next(client.stream("hi"))
    assert fake.requests == []


def test_several_choices_are_kept_apart(call, fake: FakeServer):
    fake.generate = lambda request, context: iter(
        [
            response(started(), delta(0, [1], "a", choice=1), delta(0, [2], "b", choice=0)),
            response(choice_finished(1, choice=1), choice_finished(1, choice=0), finished(2)),
        ]
    )
    completion = call("generate", "hi", num_choices=2)
    assert [(choice.index, choice.text, choice.token_ids) for choice in completion.choices] == [
        (0, "b", (2,)),
        (1, "a", (1,)),
    ]


def test_wait_until_ready_names_the_obstacle(call, fake: FakeServer):
    call("wait_until_ready", 20.0)
    fake.status.state = operations_pb2.SCHEDULER_STATE_NOT_READY
    with pytest.raises(DeadlineError, match="the scheduler is not ready"):
        call("wait_until_ready", 0.3)


def test_unknown_enum_value_is_a_protocol_error(call, fake: FakeServer):
    fake.status.state = 77
    with pytest.raises(ProtocolError, match="unknown scheduler state 77"):
        call("status")


def test_delivery_switches_reach_the_server(call, fake: FakeServer):
    fake.generate = lambda request, context: iter(
        [response(started(), delta(0, [], "ab"), choice_finished(2), finished(2))]
    )
    completion = call("generate", "hi", token_ids=False, final_only=True)
    assert (completion.text, completion.token_ids) == ("ab", ())
    output = fake.requests[0].output
    assert (output.HasField("text"), output.HasField("token_ids"), output.token_ids) == (False, True, False)
    assert output.delivery == generation_pb2.OutputParams.DELIVERY_FINAL_ONLY
