"""Deadlines, the queue bound, drain and the calls themselves."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from stepahead.v1 import generation_pb2, operations_pb2
from tests.e2e.stack import BOUND_S, Answer, Stack, details_of, eventually, fold, read, read_events, request, serve

pytestmark = pytest.mark.e2e

ONE_ROW = {"max_num_seqs": 1}
SLOW = "toy:sleep?ms=5"
SERVICES = (
    (generation_pb2, "GenerationService"),
    (generation_pb2, "ModelService"),
    (operations_pb2, "OperationsService"),
)


@pytest.mark.parametrize("field", ["queue_timeout_ms", "timeout_ms"])
async def test_a_deadline_in_the_queue(field: str) -> None:
    """D8: one terminal, which says where the request was."""
    async with serve(SLOW, worker=ONE_ROW) as stack:
        first = stack.open(request([1], 120))
        leading = Answer()
        await read_events(first, "started", leading)
        late = await stack.generate([2], 5, **{field: 60})
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert dict(late.error_info.metadata) == {"phase": "queue", "output_tokens": "0"}
        assert (late.started, late.reason) == (None, ""), "never admitted: a status alone"
        await fold(first, leading)
        assert (leading.ok, len(leading.token_ids)) == (True, 120)
        await stack.assert_quiescent()


async def test_a_deadline_in_the_run() -> None:
    async with serve(SLOW) as stack:
        late = await stack.generate([1], 250, timeout_ms=100, queue_timeout_ms=50)
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert late.error_info.metadata["phase"] == "run"
        assert late.error_info.metadata["output_tokens"] == str(len(late.token_ids))
        assert 0 < len(late.token_ids) < 250
        assert (await stack.generate([1], 5, queue_timeout_ms=50)).ok, "admitted in time, however long it runs"
        await stack.assert_quiescent()
        assert (await stack.status()).totals.requests_failed == 1


async def test_the_deadline_of_the_call_ends_the_request() -> None:
    async with serve(SLOW) as stack:
        answer = await fold(stack.generation.Generate(request([1], 250), timeout=0.1))
        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.assert_quiescent()
        assert (await stack.status()).totals.output_tokens < 250


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    """BL-15, F8: 12 at once, one row, one place to wait: everybody is answered."""
    async with serve(SLOW, worker=ONE_ROW, max_waiting_requests=1) as stack:
        answers = await stack.answers([request([index], 20) for index in range(12)])
        served = [answer for answer in answers if answer.ok]
        refused = [answer for answer in answers if not answer.ok]
        assert len(served) >= 2
        assert len(refused) >= 1
        for answer in refused:
            assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert answer.error_info.reason == "QUEUE_FULL"
            assert answer.detail(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
            assert answer.detail(error_details_pb2.QuotaFailure).violations
        assert (await stack.generate([1], 3)).ok
        await stack.assert_quiescent()


async def test_drain_and_resume() -> None:
    """O6."""
    async with serve(SLOW) as stack:
        running = stack.open(request([1], 60))
        answer = Answer()
        await read_events(running, "started", answer)
        drained = asyncio.ensure_future(stack.operations.Drain(operations_pb2.DrainRequest()))
        await eventually(lambda: stack.server.front_end.draining)
        assert (await stack.status()).state == operations_pb2.SCHEDULER_STATE_DRAINING
        refused = await stack.generate([1], 1)
        assert (refused.code, refused.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await fold(running, answer)
        assert answer.ok
        assert ((await drained).finished, (await drained).cancelled) == (1, 0)
        await stack.operations.Resume(operations_pb2.ResumeRequest())
        assert (await stack.generate([1], 1)).ok


async def test_a_drain_with_a_bound_cancels_the_rest() -> None:
    async with serve(SLOW) as stack:
        running = stack.open(request([1], 250))
        answer = Answer()
        await read_events(running, "started", answer)
        drained = await stack.operations.Drain(operations_pb2.DrainRequest(timeout_ms=30))
        assert (drained.finished, drained.cancelled) == (0, 1)
        await fold(running, answer)
        assert (answer.code, answer.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        again = await stack.operations.Drain(operations_pb2.DrainRequest())
        assert (again.finished, again.cancelled) == (0, 0)


async def test_a_server_that_stops_cannot_be_resumed() -> None:
    """O6: else an operator's Resume would let requests in that the end of the process cuts off."""
    async with serve(SLOW, drain_timeout_s=30.0) as stack:
        running = stack.open(request([1], 60))
        answer = Answer()
        await read_events(running, "started", answer)
        stopping = asyncio.create_task(stack.server.stop())
        await eventually(lambda: stack.server.front_end.draining)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.operations.Resume(operations_pb2.ResumeRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await stack.generate([1], 1)).error_info.reason == "DRAINING"
        await fold(running, answer)
        assert answer.ok
        await stopping


async def end_of(stack: Stack, method: Any, message: Any, *, one_request: bool, one_response: bool) -> Any:
    """Calls a method by its descriptor and returns the finished call."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = ("unary" if one_request else "stream") + "_" + ("unary" if one_response else "stream")
    stub = getattr(stack.channel, kind)(path, request_serializer=lambda value: value)
    call = stub(message, timeout=BOUND_S) if one_request else stub(timeout=BOUND_S)
    if not one_request:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(message)
            await call.done_writing()
    if one_response:
        await asyncio.wait({asyncio.ensure_future(call.code())})
    else:
        while await read(call) is not None:
            pass
    return call


@pytest.mark.parametrize("payload", [b"", b"\xff\xff\xff"], ids=["empty", "garbage"])
@pytest.mark.parametrize("has_worker", [True, False])
async def test_no_call_ends_unknown(has_worker: bool, payload: bytes) -> None:
    """Every method, with nothing in its request and with bytes that are no message."""
    codes: dict[str, grpc.StatusCode] = {}
    async with serve("toy:score-table", num_workers=int(has_worker)) as stack:
        for module, name in SERVICES:
            for method in module.DESCRIPTOR.services_by_name[name].methods:
                if method.name == "Drain":
                    continue
                call = await end_of(
                    stack,
                    method,
                    payload,
                    one_request=not method.client_streaming,
                    one_response=not method.server_streaming,
                )
                codes[method.name] = await call.code()
                assert codes[method.name] is not grpc.StatusCode.UNKNOWN, method.full_name
                if codes[method.name] is grpc.StatusCode.INVALID_ARGUMENT:
                    assert details_of(await call.trailing_metadata()), method.full_name
                if payload:
                    assert codes[method.name] is grpc.StatusCode.INVALID_ARGUMENT
    if payload:
        return
    assert codes["Attach"] is grpc.StatusCode.NOT_FOUND
    assert codes["CordonWorker"] is codes["UncordonWorker"] is grpc.StatusCode.UNIMPLEMENTED
    assert codes["GetStatus"] is grpc.StatusCode.OK
    expected = grpc.StatusCode.INVALID_ARGUMENT if has_worker else grpc.StatusCode.UNAVAILABLE
    assert codes["Generate"] is codes["Tokenize"] is expected


async def test_text_that_is_not_utf_8_names_the_request() -> None:
    """Other languages send it. `text` is field 3 of GenerateRequest."""
    async with serve("toy:score-table") as stack:
        generate = stack.channel.unary_stream(
            "/stepahead.v1.GenerationService/Generate", request_serializer=lambda value: value
        )
        answer = await fold(generate(bytes([3 << 3 | 2, 2, 0xC3, 0x28])))
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert answer.fields == ["request"]
        assert (await stack.generate("Small")).ok


async def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    async with serve("toy:score-table") as stack:
        call = stack.channel.unary_unary("/stepahead.v1.GenerationService/Nothing")(b"")
        await asyncio.wait({asyncio.ensure_future(call.code())})
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def listed_services(stack: Stack) -> set[str]:
    call: Any = reflection_pb2_grpc.ServerReflectionStub(stack.channel).ServerReflectionInfo(timeout=BOUND_S)
    # A server without reflection may have ended the call before anything is written.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.done_writing()
    response = await read(call)
    if response is None:
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        return set()
    return {service.name for service in response.list_services_response.service}


async def test_reflection_lists_the_services_on_loopback() -> None:
    async with serve("toy:score-table") as stack:
        names = {f"stepahead.v1.{name}" for _, name in SERVICES}
        assert names | {"grpc.health.v1.Health"} <= await listed_services(stack)
    async with serve("toy:score-table", reflection=False) as stack:
        assert await listed_services(stack) == set()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (operations_pb2.ListRequestsRequest(page_size=1001), "page_size"),
        (operations_pb2.ListRequestsRequest(page_token="x"), "page_token"),
        (operations_pb2.ListRequestsRequest(page_token="9" * 5000), "page_token"),
        (operations_pb2.ListRequestsRequest(page_token="²"), "page_token"),
        (operations_pb2.GetTimelineRequest(limit=4097), "limit"),
        (operations_pb2.GetTimelineRequest(worker_address="nowhere:1"), "worker_address"),
    ],
)
async def test_operations_name_bad_fields(message: Any, field: str) -> None:
    """V5."""
    async with serve("toy:score-table") as stack:
        call = (
            stack.operations.ListRequests(message)
            if isinstance(message, operations_pb2.ListRequestsRequest)
            else stack.operations.GetTimeline(message)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
        (bad,) = [
            detail
            for detail in details_of(caught.value.trailing_metadata())
            if isinstance(detail, error_details_pb2.BadRequest)
        ]
        assert [violation.field for violation in bad.field_violations] == [field]


async def test_the_timeline_tells_every_boundary() -> None:
    async with serve("toy:score-table?loop=help") as stack:
        assert (await stack.generate("Small", 20)).ok
        response = await stack.operations.GetTimeline(operations_pb2.GetTimelineRequest())
        steps = [record.completed_step_id for record in response.records]
        assert steps == list(range(1, len(steps) + 1))
        assert sum(record.committed_tokens for record in response.records) == 20
        newest = await stack.operations.GetTimeline(operations_pb2.GetTimelineRequest(limit=3))
        assert [record.completed_step_id for record in newest.records] == steps[-3:]


async def test_the_model_and_its_tokenizer() -> None:
    async with serve("toy:score-table") as stack:
        model = await stack.models.GetModel(generation_pb2.GetModelRequest())
        assert (model.model, model.vocab_size, list(model.eos_token_ids)) == ("toy:score-table", 5, [4])
        assert (model.bos_token_id, model.max_model_len) == (0, 256)
        tokens = await stack.models.Tokenize(generation_pb2.TokenizeRequest(text="Small steps"))
        assert list(tokens.token_ids) == [0, 1, 2]
        text = await stack.models.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[0, 1, 2]))
        assert text.text == "Small steps"
        with_special = generation_pb2.DetokenizeRequest(token_ids=[0, 1], skip_special_tokens=False)
        assert (await stack.models.Detokenize(with_special)).text == "<start> Small"
        chunks = [chunk async for chunk in stack.models.GetTokenizer(generation_pb2.GetTokenizerRequest())]
        assert chunks[-1].sha256 == model.tokenizer_sha256
    async with serve("toy:tagged") as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stack.models.GetTokenizer(generation_pb2.GetTokenizerRequest()):
                pass
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
