"""A closed load: all requests at once, greedy, with end-of-sequence ignored.

Every run of a shape feeds and samples exactly the same numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepahead.cli.bench_drive import PlannedRequest, drive
from stepahead.cli.bench_server import watched_steps, workers_of
from stepahead.v1 import generation_pb2, operations_pb2


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
    tokens_per_s: float
    """Output tokens, prompt processing included."""
    num_messages: int
    records: list[operations_pb2.StepRecord]
    """The steps of this run, over all workers."""
    running_share: float
    """Boundaries that said another step was running."""


def token_request(token_ids: Sequence[int], output_tokens: int) -> generation_pb2.GenerateRequest:
    """A greedy request for exactly `output_tokens` tokens, without text."""
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIdsInput(ids=token_ids),
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingParams(max_tokens=output_tokens, ignore_eos=True),
        output=generation_pb2.OutputParams(text=False),
    )


def make_request(shape: LoadShape, index: int) -> generation_pb2.GenerateRequest:
    """Request number `index`: a prompt of its own from a fixed arithmetic, greedy, no text."""
    span = max(1, shape.vocab_size - 16)
    ids = [8 + (index * 7919 + position * 104729) % span for position in range(shape.prompt_tokens)]
    return token_request(ids, shape.output_tokens)


async def run_load(address: str, shape: LoadShape) -> LoadResult:
    """Runs the load once against a server."""
    before = await workers_of(address)
    requests = [PlannedRequest(message=make_request(shape, index)) for index in range(shape.num_requests)]
    done = await drive(address, requests, multiplexed=shape.multiplexed)
    steps = await watched_steps(address, before)
    return LoadResult(
        tokens={index: answer.token_ids for index, answer in enumerate(done.answers)},
        tokens_per_s=done.tokens_per_s,
        num_messages=done.num_messages,
        records=steps.records,
        running_share=steps.running_share,
    )
