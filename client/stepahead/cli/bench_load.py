"""A closed load over raw messages: the measuring side must cost as little as it can.

All requests are sent at once, greedy or seeded, with end-of-sequence ignored, so that every run feeds and
samples exactly the same numbers of tokens.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from stepahead.client.channel import open_aio_channel
from stepahead.v1 import generation_pb2, generation_pb2_grpc, operations_pb2, operations_pb2_grpc

MAX_TIMELINE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """What to send."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    multiplexed: bool
    """One Multiplex stream for all, or a Generate stream each."""
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What one run of a load gave."""

    tokens: dict[int, list[int]]
    """Output by request number."""
    duration_s: float
    num_messages: int
    records: list[operations_pb2.StepRecord]
    """The steps of this run on the first worker."""
    running_share: float
    """Boundaries that said another step was running."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, prompt processing included."""
        return sum(len(tokens) for tokens in self.tokens.values()) / self.duration_s


def make_request(shape: LoadShape, index: int) -> generation_pb2.GenerateRequest:
    """Request number `index`: a prompt of its own from a fixed arithmetic, greedy, no text."""
    span = max(1, shape.vocab_size - 16)
    ids = [8 + (index * 7919 + position * 104729) % span for position in range(shape.prompt_tokens)]
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIdsInput(ids=ids),
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingParams(max_tokens=shape.output_tokens, ignore_eos=True),
        output=generation_pb2.OutputParams(text=False),
    )


async def run_load(address: str, shape: LoadShape) -> LoadResult:
    """Runs the load once against a server."""
    async with open_aio_channel(address) as channel:
        operations = operations_pb2_grpc.OperationsServiceStub(channel)
        before = (await operations.GetStatus(operations_pb2.GetStatusRequest())).workers[0].steps
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        send = _multiplexed if shape.multiplexed else _separate
        start_s = time.perf_counter()
        tokens, num_messages = await send(stub, shape)
        duration_s = time.perf_counter() - start_s
        after = (await operations.GetStatus(operations_pb2.GetStatusRequest())).workers[0].steps
        num_steps = after.boundaries - before.boundaries
        timeline = operations_pb2.GetTimelineRequest(limit=min(MAX_TIMELINE, num_steps))
        records = list((await operations.GetTimeline(timeline)).records)
    running = after.boundaries_with_running_step - before.boundaries_with_running_step
    return LoadResult(
        tokens=tokens,
        duration_s=duration_s,
        num_messages=num_messages,
        records=records,
        running_share=running / max(1, num_steps),
    )


async def _multiplexed(
    stub: generation_pb2_grpc.GenerationServiceAsyncStub, shape: LoadShape
) -> tuple[dict[int, list[int]], int]:
    call = stub.Multiplex()
    for index in range(shape.num_requests):
        submit = generation_pb2.MultiplexSubmit(handle=index, request=make_request(shape, index))
        await call.write(generation_pb2.MultiplexRequest(submit=submit))
    await call.done_writing()
    tokens: dict[int, list[int]] = {index: [] for index in range(shape.num_requests)}
    num_messages = 0
    async for response in call:
        num_messages += 1
        columns = response.tokens
        counts = columns.token_counts or [1] * len(columns.handles)
        start = 0
        for handle, count in zip(columns.handles, counts, strict=True):
            tokens[handle] += columns.token_ids[start : start + count]
            start += count
        for entry in response.events:
            for event in entry.events:
                tokens[entry.handle] += event.delta.token_ids
        if response.failures:
            raise RuntimeError(f"a request failed: {response.failures[0].status.message}")
    return tokens, num_messages


async def _separate(
    stub: generation_pb2_grpc.GenerationServiceAsyncStub, shape: LoadShape
) -> tuple[dict[int, list[int]], int]:
    tokens: dict[int, list[int]] = {index: [] for index in range(shape.num_requests)}

    async def one(index: int) -> int:
        num_messages = 0
        async for response in stub.Generate(make_request(shape, index)):
            num_messages += 1
            for event in response.events:
                tokens[index] += event.delta.token_ids
        return num_messages

    return tokens, sum(await asyncio.gather(*[one(index) for index in range(shape.num_requests)]))
