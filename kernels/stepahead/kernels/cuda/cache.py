"""The paged KV cache on the device.

KV layout, for CUDA: `reference.attention`'s for every layer, all layers in one array

    [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]      third axis: 0 = keys, 1 = values

so a (block, key or value, head) is one contiguous run, read in 16-byte pieces. No block has to be cleared before
its first use: no kernel here reads a place that no token of the row has written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stepahead.kernels.cuda.backend import Backend, Launch
from stepahead.kernels.cuda.checks import VECTOR_BYTES, check_tensor, check_vectors, token_stride
from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.sources import Module

_COPY_THREADS = 256


def write_kv(backend: Backend, cache: torch.Tensor, keys_values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Stores a step's keys and values; see `reference.attention.write_kv`.

    Args:
        backend: where the tensors are.
        cache: one layer, [num_blocks, 2, num_kv_heads, block_size, head_dim], written in place.
        keys_values: [num_tokens, 2 * num_kv_heads, head_dim], keys first, as `cache`; tokens may be apart.
        slot_mapping: [num_tokens] int64, a kv_slot, or -1 for a token that writes nothing.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    check_tensor(cache, "cache", cache.dtype, (None, 2, None, None, None))
    check_vectors(cache, "cache")
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    check_head(head_dim, cache.element_size())
    stride = token_stride(keys_values, "keys_values", cache.dtype, (None, 2 * num_kv_heads, head_dim))
    check_tensor(slot_mapping, "slot_mapping", torch.int64, (len(keys_values),))
    per_piece = VECTOR_BYTES // cache.element_size()
    backend.launch(
        Launch(
            module=Module("write_kv"),
            kernel="write_kv",
            grid=(len(keys_values), 1, 1),
            num_threads=256,
            arguments=(
                *(cache, keys_values, slot_mapping, np.int64(stride // per_piece)),
                *(np.int32(num_kv_heads), np.int32(block_size), np.int32(head_dim // per_piece)),
            ),
        )
    )


def check_head(head_dim: int, element_size: int) -> None:
    """Raises `KernelArgumentError` unless a head is made of 16-byte pieces."""
    if head_dim * element_size % VECTOR_BYTES:
        message = f"a head of {head_dim} values of {element_size} bytes is not made of {VECTOR_BYTES}-byte pieces"
        raise KernelArgumentError(message)


def change_blocks(
    backend: Backend, cache: torch.Tensor, copies: Sequence[tuple[int, int]], zeroed: Sequence[int]
) -> None:
    """Copies blocks (source, destination), all sources read before the first write, then zeroes blocks.

    Args:
        backend: where the cache is.
        cache: all layers, [num_layers, num_blocks, ...].
        copies: a destination is named once.
        zeroed: block ids.

    Raises:
        KernelArgumentError: a block that is not there, or a destination named twice.
    """
    check_tensor(cache, "cache", cache.dtype, (None, None, 2, None, None, None))
    named = {block for pair in copies for block in pair} | set(zeroed)
    destinations = [destination for _, destination in copies]
    if any(not 0 <= block < cache.shape[1] for block in named) or len(set(destinations)) != len(destinations):
        message = f"copies {list(copies)} and zeroed {list(zeroed)} do not fit {cache.shape[1]} blocks"
        raise KernelArgumentError(message)
    if {source for source, _ in copies} & set(destinations):
        # A launch copies in no order: where one block is both, everything goes through a second buffer.
        buffer = backend.allocate((cache.shape[0], len(copies), *cache.shape[2:]), cache.dtype)
        _copy(backend, buffer, cache, [(source, place) for place, (source, _) in enumerate(copies)])
        _copy(backend, cache, buffer, list(enumerate(destinations)))
    else:
        _copy(backend, cache, cache, copies)
    pieces = _block_pieces(cache)
    ids = backend.upload(np.array(zeroed, np.int32))
    backend.launch(
        Launch(
            module=Module("copy_blocks"),
            kernel="zero_blocks",
            grid=(-(-pieces // _COPY_THREADS), len(zeroed), cache.shape[0]),
            num_threads=_COPY_THREADS,
            arguments=(cache, ids, np.int64(cache.shape[1] * pieces), np.int64(pieces)),
        )
    )


def _block_pieces(cache: torch.Tensor) -> int:
    num_bytes = int(np.prod(cache.shape[2:])) * cache.element_size()
    if num_bytes % VECTOR_BYTES:
        message = f"a block of {num_bytes} bytes is not made of {VECTOR_BYTES}-byte pieces"
        raise KernelArgumentError(message)
    return num_bytes // VECTOR_BYTES


def _copy(backend: Backend, to: torch.Tensor, source: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    pieces = _block_pieces(source)
    device_pairs = backend.upload(np.array(pairs, np.int32).reshape(-1, 2))
    strides = (np.int64(to.shape[1] * pieces), np.int64(source.shape[1] * pieces))
    backend.launch(
        Launch(
            module=Module("copy_blocks"),
            kernel="copy_blocks",
            grid=(-(-pieces // _COPY_THREADS), len(pairs), source.shape[0]),
            num_threads=_COPY_THREADS,
            arguments=(to, source, device_pairs, *strides, np.int64(pieces)),
        )
    )
