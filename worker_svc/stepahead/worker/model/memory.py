"""Running out of the host's memory, as an error that says how much was needed and what to lower."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import torch

from stepahead.worker.errors import ModelError
from stepahead.worker.host_memory import available_memory_bytes
from stepahead.worker.model.weights import WeightSource
from stepahead.worker.runner import CacheShape

# torch has no class for it on the CPU.
_TORCH_SAYS = "DefaultCPUAllocator"
CACHE_REMEDY = "lower --num-kv-blocks, --kv-cache-bytes, --max-model-len or --max-num-seqs"


@contextmanager
def refused_without_memory(what: str, needed_bytes: int, remedy: str) -> Generator[None]:
    """Turns what NumPy, torch and the step library raise without memory into a ModelError.

    Args:
        what: is allocated inside; begins the message.
        needed_bytes: of all of it.
        remedy: which options to change.
    """
    available_bytes = available_memory_bytes()
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _TORCH_SAYS not in str(error):
            raise
        raise ModelError(
            f"{what} needs {_size(needed_bytes)}, and {_size(available_bytes)} of memory are available: {remedy}"
        ) from error


def weight_bytes_of(source: WeightSource, dtype: torch.dtype) -> int:
    """Bytes of all tensors once they are loaded as `dtype`."""
    return sum(math.prod(shape) for shape in source.shapes.values()) * dtype.itemsize


def weight_remedy(dtype: torch.dtype) -> str:
    """What makes weights smaller."""
    halves = "--dtype bfloat16 halves it, or " if dtype == torch.float32 else ""
    return f"{halves}take a smaller --model"


def cache_bytes_of(shape: CacheShape, bytes_per_token: int, num_layers: int) -> int:
    """Bytes of the KV cache of all layers; `bytes_per_token` is that of all of them."""
    groups = shape.layer_groups
    blocks = (shape.num_blocks, *(groups.more_blocks if groups else ()))
    of_layer = groups.of_layer if groups else (0,) * num_layers
    return sum(blocks[group] for group in of_layer) * shape.block_size * bytes_per_token // num_layers


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
