"""One recorded plan sequence, replayed with and without overlap on a transformer in float32 (rules D4, G7).

Arrival timing changes the shape of batches, and shapes change the last bits of a matrix product. So the
promise for real models is about plans: the same plans give the same tokens, whoever waits for whom.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepahead.scheduler.worker_link import WorkerLink
from stepahead.v1 import generation_pb2, worker_pb2
from stepahead.worker.announce import Announcer
from stepahead.worker.model.registry import make_runner
from stepahead.worker.server import WorkerServer
from tests.conformance.double import Scheduler, connect
from tests.e2e import stack as e2e

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Tokens = list[tuple[int, list[int]]]
"""Per step: (step id, tokens in row order)."""


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    import torch
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("tiny-llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def mixed_requests(count: int, *, vocab_size: int, max_tokens: int) -> list[generation_pb2.GenerateRequest]:
    """Prompts and answers of many lengths, greedy and seeded."""
    rng = random.Random(11)
    return [
        generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIdsInput(
                ids=[rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 3, 9, 30, 60]))]
            ),
            sampling=generation_pb2.SamplingParams(temperature=rng.choice([0.0, 0.0, 0.8]), top_p=0.95, seed=index),
            stopping=generation_pb2.StoppingParams(max_tokens=rng.randint(1, max_tokens)),
            output=generation_pb2.OutputParams(text=False),
        )
        for index in range(count)
    ]


async def record(
    monkeypatch: pytest.MonkeyPatch, address: str, requests: Sequence[generation_pb2.GenerateRequest]
) -> tuple[list[worker_pb2.StepPlan], list[e2e.Answer]]:
    """Serves the requests with overlap on and keeps every plan."""
    plans: list[worker_pb2.StepPlan] = []
    send = WorkerLink.send_plan

    def keep(link: WorkerLink, plan: worker_pb2.StepPlan, *, work_waited: bool) -> None:
        plans.append(worker_pb2.StepPlan.FromString(plan.SerializeToString()))
        send(link, plan, work_waited=work_waited)

    monkeypatch.setattr(WorkerLink, "send_plan", keep)
    async with e2e.serve_scheduler(address, overlap_depth=1) as stack:
        await e2e.eventually(lambda: len(stack.server.engine.links) == 1)
        # No deadline: a float32 model on a busy machine takes what it takes.
        answers = await asyncio.gather(*(e2e.fold(stack.generation.Generate(each)) for each in requests))
        await stack.assert_quiescent()
    monkeypatch.undo()
    return plans, list(answers)


async def replay(
    server: WorkerServer, plans: Sequence[worker_pb2.StepPlan], *, epoch: int, overlap_depth: int
) -> Tokens:
    """Sends the plans again, at most D + 1 unanswered, and returns what each step sampled."""
    in_place = worker_pb2.SETTLE_MODE_COMPLETE_IN_PLACE
    results: Tokens = []
    async with connect(server) as stub:
        scheduler = Scheduler(stub)
        await scheduler.open(
            scheduler_instance_id=f"replay-{epoch}", scheduler_epoch=epoch, overlap_depth=overlap_depth
        )
        for recorded in plans:
            while len(results) < recorded.step_id - 1 - overlap_depth:
                results.append(tokens_of(await scheduler.boundary()))
            plan = worker_pb2.StepPlan.FromString(recorded.SerializeToString())
            plan.committed_through = len(results)
            if overlap_depth == 0:
                plan.settle = in_place
            await scheduler.send(plan=plan)
        while len(results) < len(plans):
            results.append(tokens_of(await scheduler.boundary()))
        await scheduler.send(close=worker_pb2.CloseSession(reason="done"))
    return results


def tokens_of(boundary: worker_pb2.StepBoundary) -> tuple[int, list[int]]:
    return boundary.completed_step_id, list(boundary.completion.token_ids)


async def check(
    monkeypatch: pytest.MonkeyPatch, model: str, num_requests: int, max_tokens: int, **limits: Any
) -> None:
    # One thread: two that spin at barriers on a busy machine take seconds per step.
    settings = e2e.worker_settings(model, dtype="float32", threads=1, **limits)
    server = WorkerServer(settings, lambda: make_runner(model, dtype="float32", threads=1), Announcer(None))
    await server.listen()
    try:
        await server.load()
        requests = mixed_requests(num_requests, vocab_size=131, max_tokens=max_tokens)
        plans, answers = await record(monkeypatch, server.address, requests)
        on = await replay(server, plans, epoch=1001, overlap_depth=1)
        off = await replay(server, plans, epoch=1002, overlap_depth=0)
    finally:
        await asyncio.shield(server.close())
    assert on == off
    delivered = sum(len(answer.token_ids) for answer in answers)
    assert delivered <= sum(len(tokens) for _, tokens in on)  # overrun rows sample too
    assert all(answer.finished is not None for answer in answers)


async def test_d4_a_replayed_tiny_llama_gives_the_same_tokens(monkeypatch, tiny_llama):
    await check(
        monkeypatch, str(tiny_llama), 60, 24, num_kv_blocks=40, max_num_batched_tokens=24, max_model_len=128
    )


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.skipif("STEPAHEAD_TEST_SMOLLM2" not in os.environ, reason="STEPAHEAD_TEST_SMOLLM2 names no GGUF file")
@pytest.mark.filterwarnings("default")
async def test_d4_a_replayed_smollm2_gives_the_same_tokens(monkeypatch):
    await check(
        monkeypatch,
        os.environ["STEPAHEAD_TEST_SMOLLM2"],
        16,
        12,
        num_kv_blocks=70,
        max_num_batched_tokens=64,
        max_model_len=128,
    )
