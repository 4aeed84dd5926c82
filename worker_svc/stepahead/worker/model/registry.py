"""From a model specification to a runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from stepahead.worker.errors import ModelError
from stepahead.worker.runner import LaunchingRunner, Runner
from stepahead.worker.toy.hashed import SleepRunner, TaggedRunner
from stepahead.worker.toy.lessons import ScoreTableRunner, WindowSumRunner, running_sum_runner
from stepahead.worker.toy.options import PREFIX, ToySpec, parse_toy_spec

if TYPE_CHECKING:
    from stepahead.kernels.cuda.backend import Backend
    from stepahead.worker.model.cuda_engine import CudaOptions
    from stepahead.worker.ranks.place import RankPlace

TOYS: dict[str, Callable[[ToySpec], Runner]] = {
    "score-table": ScoreTableRunner,
    "running-sum": running_sum_runner,
    "window-sum": WindowSumRunner,
    "tagged": TaggedRunner,
    "sleep": SleepRunner,
}


KERNELS_ENV = "STEPAHEAD_CPU_KERNELS"


DETERMINISTIC_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""What cuBLAS must find in the environment to give the same bits in every run."""


def make_runner(
    spec: str,
    *,
    dtype: str = "auto",
    threads: int | None = None,
    kernels: str | None = None,
    place: RankPlace | None = None,
) -> Runner:
    """Returns a runner for a model; nothing is read or downloaded before its `load`.

    Args:
        spec: a directory, a FILE.gguf, a hub id, or `toy:NAME?options`.
        dtype: "auto", "bfloat16" or "float32"; toys compute in integers whatever it says.
        threads: compute threads; None: one per core this process may use.
        kernels: "auto", "native" or "torch", see `cpu_runner`; None: what STEPAHEAD_CPU_KERNELS says, or "auto".
        place: of rank 0 among several ranks; None: it is the only one.

    Raises:
        ModelError: a toy or an option that does not exist, an unknown dtype or kind of kernels, or a toy on several
            ranks.
    """
    if spec.startswith(PREFIX):
        if place is not None:
            raise ModelError(f"--tensor-parallel-size {place.size}: a toy model computes on one rank")
        toy = parse_toy_spec(spec)
        if toy.name not in TOYS:
            raise ModelError(f"toy model {toy.name!r} does not exist; there are {', '.join(sorted(TOYS))}")
        return TOYS[toy.name](toy)
    from stepahead.worker.model.cpu_runner import CpuRunner  # noqa: PLC0415 - a toy needs no torch

    return CpuRunner(spec, dtype, threads, kernels or os.environ.get(KERNELS_ENV) or "auto", place)


def make_cuda_runner(
    spec: str,
    device: str,
    *,
    dtype: str = "auto",
    graphs: bool = True,
    deterministic: bool = False,
    place: RankPlace | None = None,
) -> LaunchingRunner:
    """Returns a runner on a GPU; nothing is read or downloaded before its `load`.

    Args:
        spec: a directory, a FILE.gguf or a hub id.
        device: "cuda" or "cuda:N".
        dtype: "auto", "bfloat16", "float16" or "float32".
        graphs: see `CudaOptions`.
        deterministic: see `CudaOptions`.
        place: of rank 0 among several ranks; None: it is the only one.

    Raises:
        ModelError: a toy, an unknown dtype, or no such GPU here.
    """
    if spec.startswith(PREFIX):
        raise ModelError("toy models compute on the CPU: leave --device at cpu")
    from stepahead.worker.model.cuda_runner import CudaRunner  # noqa: PLC0415 - a toy needs no torch

    options = cuda_options(graphs=graphs, deterministic=deterministic)
    return CudaRunner(spec, dtype, open_gpu(device, place), options, place)


def cuda_options(*, graphs: bool, deterministic: bool) -> CudaOptions:
    """Returns how an engine runs, and sets what cuBLAS reads from the environment; before torch uses a GPU."""
    from stepahead.worker.model.cuda_engine import CudaOptions  # noqa: PLC0415

    if deterministic:
        os.environ.setdefault(*DETERMINISTIC_WORKSPACE)
    return CudaOptions(graphs=graphs, deterministic=deterministic)


@cache
def open_gpu(device: str, place: RankPlace | None = None) -> Backend:
    """Returns the one back end of a GPU in this process; raises `ModelError` where there is none.

    Args:
        device: "cuda" or "cuda:N"; of several ranks' GPUs on this machine the first one.
        place: of this process among several ranks; None: it is the only one.
    """
    from stepahead.kernels.cuda.cupy_backend import CupyBackend  # noqa: PLC0415 - imports torch
    from stepahead.kernels.cuda.errors import KernelUnavailable  # noqa: PLC0415

    try:
        return CupyBackend(_gpu_index(device, place))
    except KernelUnavailable as error:
        raise ModelError(f"--device {device}: {error}") from error


def _gpu_index(device: str, place: RankPlace | None) -> int:
    """Each rank of a machine has the GPU behind the last one's. Raises `ModelError` if there are too few."""
    from stepahead.kernels.cuda.cupy_backend import visible_gpus  # noqa: PLC0415 - imports torch

    first = int(device.partition(":")[2] or 0)
    if place is None:
        return first
    visible = visible_gpus()
    last = first + max(place.local_size, place.local_rank + 1) - 1
    if last >= len(visible):
        raise ModelError(
            f"--tensor-parallel-size {place.size}: the ranks on this machine need a GPU each, cuda:{first} to "
            f"cuda:{last}, and CUDA shows {len(visible)}{''.join(f', {gpu}' for gpu in visible)}"
        )
    return first + place.local_rank
