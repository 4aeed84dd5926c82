"""Many requests over one stream: submit, cancel by handle, failures in band, ends of the stream."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from stepahead.v1 import generation_pb2
from tests.e2e.stack import BOUND_S, DELIVERY_FINAL_ONLY, Answer, Stack, eventually, read, request, serve, unpack
from tests.e2e.tagged_oracle import continuation, expected

pytestmark = pytest.mark.e2e


class Session:
    """One Multiplex call and the answers it has brought so far, by handle."""

    def __init__(self, stack: Stack) -> None:
        self.call: Any = stack.generation.Multiplex(timeout=BOUND_S)
        self.answers: dict[int, Answer] = {}
        self.num_columns = 0
        self.num_messages = 0
        self.num_silent = 0

    async def submit(self, handle: int, message: generation_pb2.GenerateRequest) -> None:
        self.answers[handle] = Answer()
        submit = generation_pb2.MultiplexSubmit(handle=handle, request=message)
        await self.call.write(generation_pb2.MultiplexRequest(submit=submit))

    async def cancel(self, *handles: int) -> None:
        cancel = generation_pb2.MultiplexCancel(handles=handles)
        await self.call.write(generation_pb2.MultiplexRequest(cancel=cancel))

    async def read(self) -> bool:
        """Folds the next message in; false at the end of the stream."""
        response = await read(self.call)
        if response is None:
            return False
        self.num_messages += 1
        self.num_silent += not response.ByteSize()
        columns = response.tokens
        counts = list(columns.token_counts) or [1] * len(columns.handles)
        ids = list(columns.token_ids)
        for handle, first, count in zip(columns.handles, columns.first_token_indexes, counts, strict=True):
            answer = self.answers[handle]
            assert answer.started is not None
            assert first == len(answer.token_ids)
            answer.add_tokens([ids.pop(0) for _ in range(count)])
            self.num_columns += 1
        assert not ids
        for events in response.events:
            assert not self.has_ended(events.handle)
            for event in events.events:
                self.answers[events.handle].add(event)
        for failure in response.failures:
            answer = self.answers[failure.handle]
            assert answer.code is grpc.StatusCode.OK
            assert answer.finished is None
            answer.code = next(code for code in grpc.StatusCode if code.value[0] == failure.status.code)
            answer.message = failure.status.message
            answer.details = unpack(failure.status)
        return True

    def has_ended(self, handle: int) -> bool:
        answer = self.answers[handle]
        return answer.finished is not None or answer.code is not grpc.StatusCode.OK

    async def read_until(self, *handles: int) -> None:
        """Reads until these requests have ended."""
        while not all(map(self.has_ended, handles)):
            assert await self.read(), await self.call.code()

    async def close(self) -> grpc.StatusCode:
        """Closes the client's side and reads to the end."""
        await self.call.done_writing()
        while await self.read():
            pass
        return await self.call.code()


@pytest.mark.parametrize("want_text", [False, None])
async def test_many_requests_share_a_stream(want_text: bool | None) -> None:
    """B11, D8, J3. A client that closes its side still gets every answer."""
    fields = {} if want_text is None else {"want_text": want_text}
    async with serve("toy:tagged") as stack:
        session = Session(stack)
        messages = [
            request([7, handle], 1 + handle % 30, temperature=1.0, seed=handle, **fields) for handle in range(64)
        ]
        for handle, message in enumerate(messages):
            await session.submit(handle, message)
        assert await session.close() is grpc.StatusCode.OK
        for handle, message in enumerate(messages):
            answer = session.answers[handle]
            assert answer.finished is not None
            assert answer.token_ids == expected(message)
        assert session.num_columns > 0
        assert session.num_messages < session.num_columns, "one message holds whatever is pending"
        await stack.assert_quiescent()


async def test_requests_with_text_come_as_events() -> None:
    async with serve("toy:score-table") as stack:
        session = Session(stack)
        await session.submit(5, request("Small", 10))
        await session.submit(6, request("Small", 10, want_text=False))
        await session.read_until(5, 6)
        assert (session.answers[5].text, session.answers[5].token_ids) == ("steps help", [2, 3, 4])
        assert (session.answers[6].text, session.answers[6].token_ids) == ("", [2, 3, 4])
        await session.submit(5, request("Small steps", 10))
        await session.read_until(5)
        assert session.answers[5].text == "help", "a handle is free again after its end"
        assert await session.close() is grpc.StatusCode.OK


async def test_failures_come_in_band_and_the_stream_goes_on() -> None:
    """F8."""
    async with serve("toy:score-table") as stack:
        session = Session(stack)
        await session.submit(1, request("Small", 0))
        await session.submit(2, request("Small", model="other"))
        await session.submit(3, generation_pb2.GenerateRequest())
        await session.submit(4, request("Small", 8))
        await session.read_until(1, 2, 3, 4)
        assert session.answers[1].fields == ["stopping.max_tokens"]
        assert session.answers[2].code is grpc.StatusCode.NOT_FOUND
        assert session.answers[3].fields == ["input"]
        assert session.answers[4].text == "steps help"
        assert await session.close() is grpc.StatusCode.OK


async def test_cancel_by_handle() -> None:
    """F3, F4: unknown handles are ignored, a cancelled one ends once."""
    async with serve("toy:sleep?ms=5") as stack:
        session = Session(stack)
        for handle in (1, 2):
            await session.submit(handle, request([handle], 60, want_text=False))
        while not session.answers[1].token_ids:
            assert await session.read()
        await session.cancel(1, 77)
        await session.cancel(1)
        await session.read_until(1, 2)
        assert session.answers[1].code is grpc.StatusCode.CANCELLED
        assert session.answers[1].reason == "CANCELLED"
        assert len(session.answers[1].token_ids) < 60
        assert len(session.answers[2].token_ids) == 60
        assert await session.close() is grpc.StatusCode.OK
        await stack.assert_quiescent()


async def test_cancel_reaches_a_request_that_is_still_tokenized() -> None:
    """F1: a long prompt is tokenized beside the loop; a cancel in that time must not be lost."""
    async with serve("toy:score-table?loop=help", worker={"max_model_len": 4096, "num_kv_blocks": 2048}) as stack:
        session = Session(stack)
        await session.submit(1, request("Small " * 3000, 1000))
        await session.cancel(1)
        await session.read_until(1)
        assert session.answers[1].code is grpc.StatusCode.CANCELLED
        await session.submit(1, request("Small", 2))
        await session.read_until(1)
        assert session.answers[1].token_ids == [2, 3]
        assert await session.close() is grpc.StatusCode.OK
        await stack.assert_quiescent()
        assert (await stack.status()).totals.output_tokens < 1000


@pytest.mark.parametrize("fault", ["duplicate handle", "attached handle", "empty command"])
async def test_a_client_that_breaks_the_rules_loses_the_stream(fault: str) -> None:
    """A failure in band under a live handle would be read as that request's end (D8)."""
    async with serve("toy:sleep?ms=5") as stack:
        session = Session(stack)
        await session.submit(9, request([1], 250))
        while not session.answers[9].token_ids:
            assert await session.read()
        named = {
            "duplicate handle": "submit.handle",
            "attached handle": "attach.handle",
            "empty command": "command",
        }
        command = generation_pb2.MultiplexRequest()
        if fault == "duplicate handle":
            command.submit.CopyFrom(generation_pb2.MultiplexSubmit(handle=9, request=request([2], 1)))
        elif fault == "attached handle":
            command.attach.handle = 9
        await session.call.write(command)
        while await session.read():
            pass
        assert await session.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named[fault] in await session.call.details()
        await stack.assert_quiescent()
        assert (await stack.status()).totals.requests_cancelled == 1


async def test_a_client_that_leaves_frees_everything() -> None:
    """BL-14, F6."""
    async with serve("toy:sleep?ms=2") as stack:
        session = Session(stack)
        for handle in range(20):
            await session.submit(handle, request([handle], 250))
        await eventually(lambda: stack.server.engine.core.totals.output_tokens > 20)
        session.call.cancel()
        await stack.assert_quiescent()
        assert (await stack.status()).totals.requests_cancelled > 0


async def test_a_deadline_inside_the_stream() -> None:
    async with serve("toy:sleep?ms=5") as stack:
        session = Session(stack)
        await session.submit(1, request([1], 250, timeout_ms=60))
        await session.submit(2, request([2], 30))
        await session.read_until(1, 2)
        late = session.answers[1]
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert late.detail(error_details_pb2.ErrorInfo).metadata["phase"] == "run"
        assert len(session.answers[2].token_ids) == 30


async def test_a_silent_stream_stays_alive() -> None:
    """Requests that answer in one piece are silent, however many tokens they make."""
    async with serve("toy:sleep?ms=5", keepalive_s=0.04) as stack:
        session = Session(stack)
        await session.submit(1, request([1], 60, delivery=DELIVERY_FINAL_ONLY))
        await session.read_until(1)
        assert session.num_silent >= 2
        assert len(session.answers[1].token_ids) == 60


async def test_a_reader_that_pauses_misses_nothing() -> None:
    """Deltas coalesce while a client does not read; generation never waits for it."""
    async with serve("toy:tagged") as stack:
        session = Session(stack)
        await session.submit(1, request([1], 250, want_text=False))
        await session.submit(2, request([2], 250, delivery=DELIVERY_FINAL_ONLY))
        await eventually(lambda: not stack.server.engine.book.requests)
        await asyncio.sleep(0)
        await session.read_until(1, 2)
        assert session.answers[1].token_ids == continuation([1], 250)
        assert session.answers[2].token_ids == continuation([2], 250)
