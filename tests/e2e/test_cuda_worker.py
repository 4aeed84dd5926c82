"""The worker as it runs on a GPU, its kernels on this CPU, behind a scheduler on loopback: tokens are the CPU's.

Launching and telling threads, gates, choices, preemptions and ends are those of a real GPU; only the device is not.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import stepahead.worker.__main__ as worker_process
from stepahead.kernels.cuda.host.opaque import OpaqueBackend
from stepahead.worker.announce import Announcer
from stepahead.worker.errors import ModelError
from stepahead.worker.launch_stream import LaunchStream
from stepahead.worker.model.cuda_engine import CudaOptions
from stepahead.worker.model.cuda_runner import CudaRunner
from stepahead.worker.model.registry import make_runner
from stepahead.worker.ranks.place import RankPlace
from stepahead.worker.server import WorkerServer
from tests.e2e.stack import Stack, eventually, request, serve, serve_scheduler, worker_settings
from tests.e2e.test_constrained import constrained, fits
from tests.e2e.test_option_matrix import answer_of
from tests.kernels.cuda.conftest import compilers  # noqa: F401 - skips where kernels cannot be compiled

pytestmark = pytest.mark.e2e

WORKER = {"max_model_len": 128, "num_kv_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 24}


@asynccontextmanager
async def serve_on_device(
    model: Path, *, worker: dict[str, Any], place: RankPlace | None = None, **fields: Any
) -> AsyncIterator[Stack]:
    """A scheduler and a worker that launches its steps, alone or as rank 0."""
    backend = OpaqueBackend()
    server = WorkerServer(
        worker_settings(str(model), **worker),
        lambda: CudaRunner(str(model), "float32", backend, CudaOptions(forbid_waits=True), place),
        Announcer(None),
        lambda on_error: LaunchStream(backend.record_event, on_error),
    )
    await server.listen()
    try:
        await server.load()
        async with serve_scheduler(server.address, **fields) as stack:
            await eventually(lambda: len(stack.server.engine.links) == 1)
            yield stack
    finally:
        assert await server.close(), "the device's threads end"
    assert backend.num_replays > 0


def mixed() -> list[Any]:
    """Requests with everything that is kept on the device between steps."""
    prompt = [index % 200 for index in range(40)]
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    return [
        request(prompt, 12, ignore_eos=True),
        request(prompt[:30], 20, temperature=0.9, seed=3, ignore_eos=True),
        request(prompt[3:], 16, temperature=1.0, seed=4, top_p=0.8, ignore_eos=True, **penalties),
        request([1, 2], 30, temperature=0.7, seed=5, top_k=20),
        *(request([index, 7], 10, ignore_eos=True) for index in range(6)),
    ]


@pytest.mark.parametrize("depth", [0, 2])
async def test_g7_tokens_are_the_cpus_with_overlap_and_without(byte_model: Path, depth: int) -> None:
    """Few blocks: sequences are preempted and replayed, with their counts and draws."""
    messages = mixed()
    async with serve(str(byte_model), worker=WORKER | {"dtype": "float32"}) as stack:
        wanted = [(await stack.answer(message)).token_ids for message in messages]
    async with serve_on_device(byte_model, worker=WORKER | {"num_kv_blocks": 40}, overlap_depth=depth) as stack:
        assert [answer.token_ids for answer in await stack.answers(messages)] == wanted
        await stack.assert_quiescent()
        (worker,) = (await stack.status()).workers
        assert (worker.steps.boundaries_with_running_step > 0) == (depth > 0)
        assert worker.device == "cpu"


async def test_i7_constraints_and_choices_on_the_device(byte_model: Path) -> None:
    """Gates bring masks while the forward runs; the choices of a request fork its prompt."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds: list[dict[str, Any]] = [{"regex": "(red|green) [0-9]{1,3}"}, {"json_schema": json.dumps(schema)}]
    several = request(
        [1, 2, 3, 4, 5], 9, num_choices=3, temperature=1.0, seed=7, ignore_eos=True, logprobs={"output_top_k": 2}
    )
    async with serve(str(byte_model), worker=WORKER | {"dtype": "float32"}) as stack:
        wanted = await answer_of(stack, several)
    async with serve_on_device(byte_model, worker=WORKER) as stack:
        for seed, kind in enumerate(kinds):
            message = constrained(seed, **kind)
            message.stopping.max_tokens = 60
            answer = await stack.answer(message)
            assert answer.reason == "LENGTH" or fits(message, answer.text)
        found = await answer_of(stack, several)
        assert {choice: parts[0] for choice, parts in found.items()} == {
            choice: parts[0] for choice, parts in wanted.items()
        }
        await stack.assert_quiescent()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_a_gpu_that_is_not_there_is_told_and_every_thread_ends(byte_model: Path) -> None:
    """As the process starts it, with the real back end: no CuPy, no driver or no GPU."""
    settings = worker_settings(str(byte_model), device="cuda:0")
    server = WorkerServer(
        settings,
        lambda: worker_process._make_runner(settings, None),
        Announcer(None),
        lambda on_error: worker_process._open_stream(settings, None, on_error),
    )
    await server.listen()
    with pytest.raises(ModelError, match="--device cuda:0"):
        await server.load()
    assert await server.close()


async def test_a_runner_that_launches_nothing_is_no_runner_for_a_device() -> None:
    backend = OpaqueBackend()
    server = WorkerServer(
        worker_settings("toy:tagged"),
        lambda: make_runner("toy:tagged"),
        Announcer(None),
        lambda on_error: LaunchStream(backend.record_event, on_error),
    )
    await server.listen()
    with pytest.raises(TypeError, match="launches nothing"):
        await server.load()
    assert await server.close()
