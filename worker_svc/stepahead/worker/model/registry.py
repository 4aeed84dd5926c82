"""From a model specification to a runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from stepahead.worker.errors import OptionRefused
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
    pin_threads: bool = False,
    kernels: str | None = None,
    place: RankPlace | None = None,
    max_model_len: int | None = None,
) -> Runner:
    """Returns a runner for a model; nothing is read or downloaded before its `load`.

    Args:
        spec: a directory, a FILE.gguf, a hub id, or `toy:NAME?options`.
        dtype: "auto", "bfloat16" or "float32"; toys compute in integers whatever it says.
        threads: compute threads; None: one per core this process may use.
        pin_threads: see `DecoderStep`; only the native kernels have threads of their own.
        kernels: one of `cpu_runner.KERNELS`, "auto" or else; None: what STEPAHEAD_CPU_KERNELS says, or "auto".
        place: of rank 0 among several ranks; None: it is the only one.
        max_model_len: what is wanted; a model with less is refused before its weights are read.

    Raises:
        OptionRefused: a toy or an option that does not exist, a toy on several ranks, or `pin_threads` with another
            number of threads than of cores.
        ModelError: an unknown dtype or kind of kernels.
    """
    if spec.startswith(PREFIX):
        if place is not None:
            raise OptionRefused(f"--tensor-parallel-size {place.size}: a toy model computes on one rank")
        toy = parse_toy_spec(spec)
        if toy.name not in TOYS:
            raise OptionRefused(f"--model {spec}: {toy.name!r} does not exist; there are {', '.join(sorted(TOYS))}")
        return TOYS[toy.name](toy)
    from stepahead.worker.model.cpu_runner import CpuRunner  # noqa: PLC0415 - a toy needs no torch

    kernels = kernels or os.environ.get(KERNELS_ENV) or "auto"
    return CpuRunner(spec, dtype, threads, kernels, place, max_model_len=max_model_len, pin_threads=pin_threads)


def make_cuda_runner(
    spec: str,
    device: str,
    *,
    dtype: str = "auto",
    graphs: bool = True,
    deterministic: bool = False,
    place: RankPlace | None = None,
    max_model_len: int | None = None,
) -> LaunchingRunner:
    """Returns a runner on a GPU; nothing is read or downloaded before its `load`.

    Args:
        spec: a directory, a FILE.gguf or a hub id.
        device: "cuda" or "cuda:N".
        dtype: "auto", "bfloat16", "float16" or "float32".
        graphs: see `CudaOptions`.
        deterministic: see `CudaOptions`.
        place: of rank 0 among several ranks; None: it is the only one.
        max_model_len: what is wanted; a model with less is refused before its weights are read.

    Raises:
        OptionRefused: a toy, or no such GPU here.
        ModelError: an unknown dtype.
    """
    if spec.startswith(PREFIX):
        raise OptionRefused(f"--device {device}: toy models compute on the CPU")
    from stepahead.worker.model.cuda_runner import CudaRunner  # noqa: PLC0415 - a toy needs no torch

    options = cuda_options(graphs=graphs, deterministic=deterministic)
    return CudaRunner(spec, dtype, open_gpu(device, place), options, place, max_model_len=max_model_len)


def cuda_options(*, graphs: bool, deterministic: bool) -> CudaOptions:
    """Returns how an engine runs, and sets what cuBLAS reads from the environment; before torch uses a GPU."""
    from stepahead.worker.model.cuda_engine import CudaOptions  # noqa: PLC0415

    if deterministic:
        os.environ.setdefault(*DETERMINISTIC_WORKSPACE)
    return CudaOptions(graphs=graphs, deterministic=deterministic)


@cache
def open_gpu(device: str, place: RankPlace | None = None) -> Backend:
    """Returns the one back end of a GPU in this process; raises `OptionRefused` where there is none.

    Args:
        device: "cuda" or "cuda:N"; of several ranks' GPUs on this machine the first one.
        place: of this process among several ranks; None: it is the only one.
    """
    from stepahead.kernels.cuda.cupy_backend import CupyBackend  # noqa: PLC0415 - imports torch
    from stepahead.kernels.cuda.errors import KernelUnavailable  # noqa: PLC0415

    try:
        return CupyBackend(_gpu_index(device, place))
    except KernelUnavailable as error:
        raise OptionRefused(f"--device {device}: {error}") from error


def _gpu_index(device: str, place: RankPlace | None) -> int:
    """Each rank of a machine has the GPU behind the last one's. Raises `OptionRefused` if there are too few."""
    from stepahead.kernels.cuda.cupy_backend import visible_gpus  # noqa: PLC0415 - imports torch

    first = int(device.partition(":")[2] or 0)
    if place is None:
        return first
    visible = visible_gpus()
    last = first + max(place.local_size, place.local_rank + 1) - 1
    if last >= len(visible):
        raise OptionRefused(
            f"--tensor-parallel-size {place.size}: the ranks on this machine need a GPU each, cuda:{first} to "
            f"cuda:{last}, and CUDA shows {len(visible)}{''.join(f', {gpu}' for gpu in visible)}"
        )
    return first + place.local_rank
