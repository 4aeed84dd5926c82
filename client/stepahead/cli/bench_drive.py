"""Sends planned requests as raw messages and notes when tokens come: measuring must cost as little as it can."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from stepahead.client.channel import open_aio_channel
from stepahead.client.errors import from_rpc_error, from_status
from stepahead.v1 import generation_pb2, generation_pb2_grpc

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request, when it is sent, and how its stream is read."""

    message: generation_pb2.GenerateRequest
    start_s: float = 0.0
    """Seconds after the load's start."""
    pause_s: float = 0.0
    """Seconds between two reads of its stream, until all others have ended; above 0 is a slow reader."""
    leave_after: int | None = None
    """The stream is cancelled once so many tokens have come."""


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are perf_counter's seconds."""

    due_s: float
    """When it was to be sent: a late sender's delay is part of the latency."""
    token_ids: list[int] = field(default_factory=list[int])
    arrivals: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(time, tokens) per message that had any."""
    num_messages: int = 0
    """Of its own stream; the messages of a shared stream are nobody's."""

    def take(self, token_ids: Sequence[int], now_s: float) -> None:
        """Tokens that came at a time."""
        if token_ids:
            self.token_ids += token_ids
            self.arrivals.append((now_s, len(token_ids)))


@dataclass(frozen=True, slots=True)
class Drive:
    """A load that has ended."""

    answers: list[Answer]
    """In the order of the requests."""
    duration_s: float
    """From the start to the last answer's end."""
    num_messages: int
    """Read from all streams."""

    @property
    def num_tokens(self) -> int:
        """Output tokens that arrived."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, prompt processing included."""
        return self.num_tokens / self.duration_s


async def drive(address: str, requests: Sequence[PlannedRequest], *, multiplexed: bool) -> Drive:
    """Runs the load once: one Multiplex stream for all, or a Generate stream each.

    Raises:
        StepaheadError: a request failed, or nobody serves there.
        ValueError: a slow reader or one who leaves, on a shared stream.
    """
    if multiplexed and any(request.pause_s or request.leave_after is not None for request in requests):
        raise ValueError("slow readers and those who leave need a stream of their own")
    async with open_aio_channel(address) as channel, open_aio_channel(address) as slow_channel:
        # Connections stand before the clock starts; the slow have one of their own, because flow control of a
        # connection that nobody reads holds all its streams.
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
        await asyncio.wait_for(slow_channel.channel_ready(), CONNECT_TIMEOUT_S)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        start_s = time.perf_counter()
        answers = [Answer(start_s + request.start_s) for request in requests]
        try:
            if multiplexed:
                num_messages = await _multiplexed(stub, requests, answers)
            else:
                slow_stub = generation_pb2_grpc.GenerationServiceStub(slow_channel)
                await _separately(stub, slow_stub, list(zip(requests, answers, strict=True)))
                num_messages = sum(answer.num_messages for answer in answers)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return Drive(answers, time.perf_counter() - start_s, num_messages)


async def _sleep_until(at_s: float) -> None:
    delay_s = at_s - time.perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


async def _multiplexed(
    stub: generation_pb2_grpc.GenerationServiceAsyncStub, requests: Sequence[PlannedRequest], answers: list[Answer]
) -> int:
    call = stub.Multiplex()

    async def send() -> None:
        for handle in sorted(range(len(requests)), key=lambda index: requests[index].start_s):
            if requests[handle].start_s:
                await _sleep_until(answers[handle].due_s)
            submit = generation_pb2.MultiplexSubmit(handle=handle, request=requests[handle].message)
            await call.write(generation_pb2.MultiplexRequest(submit=submit))
        await call.done_writing()

    sending = asyncio.create_task(send())
    try:
        num_messages = 0
        async for response in call:
            num_messages += 1
            _take(response, answers)
        await sending
    finally:
        sending.cancel()
    return num_messages


def _take(response: generation_pb2.MultiplexResponse, answers: list[Answer]) -> None:
    now_s = time.perf_counter()
    columns = response.tokens
    handles, token_ids = columns.handles[:], columns.token_ids[:]
    counts = columns.token_counts[:] or [1] * len(handles)
    start = 0
    for handle, count in zip(handles, counts, strict=True):
        answers[handle].take(token_ids[start : start + count], now_s)
        start += count
    for entry in response.events:
        for event in entry.events:
            answers[entry.handle].take(event.delta.token_ids[:], now_s)
    if response.failures:
        raise from_status(response.failures[0].status)


async def _separately(
    stub: generation_pb2_grpc.GenerationServiceAsyncStub,
    slow_stub: generation_pb2_grpc.GenerationServiceAsyncStub,
    streams: Sequence[tuple[PlannedRequest, Answer]],
) -> None:
    others_ended = asyncio.Event()
    slow = asyncio.gather(*[_read(slow_stub, *each, others_ended) for each in streams if each[0].pause_s])
    try:
        await asyncio.gather(*[_read(stub, *each, others_ended) for each in streams if not each[0].pause_s])
        others_ended.set()
        await slow
    finally:
        slow.cancel()


async def _read(
    stub: generation_pb2_grpc.GenerationServiceAsyncStub,
    request: PlannedRequest,
    answer: Answer,
    others_ended: asyncio.Event,
) -> None:
    if request.start_s:
        await _sleep_until(answer.due_s)
    call = stub.Generate(request.message)
    async for response in call:
        now_s = time.perf_counter()
        answer.num_messages += 1
        for event in response.events:
            answer.take(event.delta.token_ids[:], now_s)
        if request.leave_after is not None and len(answer.token_ids) >= request.leave_after:
            call.cancel()
            return
        if request.pause_s and not others_ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(others_ended.wait(), request.pause_s)
