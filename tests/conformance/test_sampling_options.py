"""Penalties and log probabilities over the wire, two steps in flight (J1, J7, J8)."""

from __future__ import annotations

import math

import pytest

from stepahead.v1 import worker_pb2
from stepahead.worker.model.registry import make_runner
from tests.conformance.double import Scheduler, connect, serve
from tests.conformance.test_steps import tokens_of
from tests.worker.plans import admission, plan, sampling

TOP_SCORE = -math.log(1 + 9 * math.exp(-9))
"""The running sum scores its next token 9 and the nine others 0."""


def running_sum():
    return make_runner("toy:running-sum")


@pytest.mark.parametrize("depth", [0, 2])
async def test_counts_and_values_do_not_depend_on_the_overlap(depth: int) -> None:
    """Prompt 1 3 6, fed 2 + 1 beside a stranger; without the penalty the outputs are 0 0 0."""
    options = sampling(frequency_penalty=10.0, logprobs_top_k=2, prompt_logprobs_top_k=1)
    plans = [
        plan(
            1,
            rows=[(1, 0, 1, True), (0, 0, 2, False)],
            admissions=[admission(0, [1, 3, 6], sampling=options), admission(1, [5])],
            joined_slots=[1],
            committed=0,
        ),
        plan(2, rows=[(0, 2, 1, True)], decode=1, joined_slots=[0], committed=max(0, 1 - depth)),
        *(plan(step_id, decode=2, committed=max(0, step_id - 1 - depth)) for step_id in (3, 4)),
    ]
    boundaries: list[worker_pb2.StepBoundary] = []
    async with serve(running_sum) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(overlap_depth=depth)
        for message in plans:
            while len(boundaries) < message.committed_through:
                boundaries.append(await scheduler.boundary())
            await scheduler.plans(message)
        while len(boundaries) < len(plans):
            boundaries.append(await scheduler.boundary())
    tokens = [token for boundary in boundaries for token in tokens_of(boundary, 0)]
    # The sum of 10 prefers 0, then again, but 0 stands at 9 - 10 now: 1 is the lowest id of score 0. The sum of 11
    # prefers 1, which stands at -1 in turn, and 0 at -10: 2 is the lowest id of score 0.
    assert tokens == [0, 1, 2]
    prompt = boundaries[0].completion.prompt_logprobs
    assert (list(prompt.slots), list(prompt.incarnations)) == ([0], [100])
    assert (list(prompt.first_positions), list(prompt.entry_counts)) == ([1], [2])
    assert list(prompt.ranks) == [2, 2]
    assert list(prompt.token_logprobs) == pytest.approx([TOP_SCORE - 9] * 2, abs=1e-5)
    assert list(prompt.top_counts) == [1, 1]
    assert list(prompt.top_token_ids) == [1, 4]
    assert not boundaries[1].completion.HasField("prompt_logprobs")
    assert not boundaries[0].completion.HasField("output_logprobs")
    output = boundaries[1].completion.output_logprobs
    assert (list(output.slots), list(output.first_positions), list(output.entry_counts)) == ([0], [3], [1])
    assert list(output.token_logprobs) == pytest.approx([TOP_SCORE], abs=1e-5)
    assert (list(output.ranks), list(output.top_counts), list(output.top_token_ids)) == ([1], [2], [0, 1])
    assert list(output.top_logprobs) == pytest.approx([TOP_SCORE, TOP_SCORE - 9], abs=1e-5)


async def test_rows_that_do_not_ask_send_nothing() -> None:
    async with serve(running_sum) as server, connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open()
        await scheduler.plans(plan(1, rows=[(0, 0, 2, True)], admissions=[admission(0, [1, 2])]))
        completion = (await scheduler.boundary()).completion
        assert not completion.HasField("output_logprobs")
        assert not completion.HasField("prompt_logprobs")
