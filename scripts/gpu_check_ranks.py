"""The part of the GPU check for two GPUs: a model shared between them. Tokens against one GPU's; decode."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from gpu_check_rig import Rig, Row
from gpu_check_steps import TINY, compare_tokens, decode_shape, measure

from stepahead.worker.model.cuda_engine import CudaOptions
from stepahead.worker.model.cuda_runner import CudaRunner
from stepahead.worker.ranks.place import RankPlace

OPTIONS = CudaOptions(forbid_waits=True)


def ranks(rig: Rig) -> Iterator[Row]:
    """Two ranks, this process and another: NCCL between GPUs, gloo on this CPU. Waits are forbidden."""
    if not rig.small and torch.cuda.device_count() < 2:
        yield {"skipped": "one GPU"}
        return
    with _shared(rig, TINY, "float32") as runner:
        alone = CudaRunner(TINY, "float32", rig.fresh_backend(), OPTIONS)
        yield {"what": "tokens of one GPU", **compare_tokens(alone, runner, rig.pick(48, 4))}
        if rig.small:
            yield from _decode(runner, (2,), 20, 4)
            return
    with _shared(rig, "random:llama-8b", "bfloat16") as runner:
        runner.load(lambda what, done, total: None)
        yield from _decode(runner, (1, 32, 256), 1024, 60)


def _decode(runner: CudaRunner, batches: tuple[int, ...], context: int, steps: int) -> Iterator[Row]:
    shape = decode_shape(max(batches), context + 3 * steps)
    runner.allocate(shape)
    for num_rows in batches:
        yield {"what": "decode"} | measure(runner, shape, num_rows, context, steps, overlap=True, graphs=True)


@contextmanager
def _shared(rig: Rig, spec: str, dtype: str) -> Iterator[CudaRunner]:
    """A runner of rank 0, to be loaded, and the worker's own process as rank 1."""
    program = "tests.e2e.shim_worker" if rig.small else "stepahead.worker"
    command = [
        *(sys.executable, "-m", program, "--model", spec, "--dtype", dtype, "--device", "cuda"),
        *("--tensor-parallel-size", "2"),
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        place = RankPlace(rank=0, size=2, local_size=2, address="127.0.0.1", port=port, listen_fd=listener.detach())
    variables = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with subprocess.Popen(command, env=os.environ | variables) as other:
        try:
            runner = CudaRunner(spec, dtype, rig.fresh_backend(), OPTIONS, place)
            yield runner
            runner.end_ranks()
            if other.wait(30):
                raise RuntimeError(f"rank 1 ended with exit code {other.returncode}")
        finally:
            other.kill()
