"""Paged attention on the device: single query tokens, and chunks on tensor cores.

Fixed order, stated once. The bits of a token's result depend on its own query, keys and values alone: tiles of keys
and splits of a context begin at multiples of a constant from position 0, a masked key weighs exactly 0, and partial
sums are added in ascending order. Batch neighbours, the width of the launch and the cuts between chunks change
nothing. (A token computed by `paged_decode` and by `paged_chunk` agrees to rounding, not to the bit.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cuda.backend import Backend, Launch
from stepahead.kernels.cuda.cache import check_head
from stepahead.kernels.cuda.checks import check_tensor, check_vectors, scalar_name, token_stride
from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.sources import Module

SPLIT_TOKENS = 512
"""Positions of a split of a decode; `paged_decode.cu` has the same number."""

TILE_QUERIES = 64
"""Packed queries (token, head of a group) a block of `paged_chunk.cu` takes."""

MAX_GROUP = 8
"""Query heads a block of `paged_decode.cu` keeps sums of, at most."""

_THREADS = 128
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What does not change from step to step."""

    scale: float
    """Factor on the scores, usually 1 / sqrt(head_dim)."""
    soft_cap: float = 0.0
    """Scores s become soft_cap * tanh(s / soft_cap) (Gemma 2); 0 is none."""
    window: int = 0
    """Tokens a query sees, its own included: position p reads keys p - window + 1 .. p; 0 is all."""


def decode_module(dtype: str, head_dim: int, group: int, block_size: int) -> Module:
    """Returns the module of `paged_decode` for a model; `group` is query heads a KV head."""
    per_block = -(-group // -(-group // MAX_GROUP))
    constants = (("SCALAR", dtype), ("HEAD_DIM", head_dim), ("GROUP", per_block), ("BLOCK_SIZE", block_size))
    return Module("paged_decode", constants)


def chunk_module(dtype: str, head_dim: int, block_size: int) -> Module:
    """Returns the module of `paged_chunk` for a model."""
    return Module("paged_chunk", (("SCALAR", dtype), ("HEAD_DIM", head_dim), ("BLOCK_SIZE", block_size)))


def chunk_shared_bytes(head_dim: int) -> int:
    """Returns the dynamic shared memory of a block of `paged_chunk`: queries, and two stages of keys and values."""
    tile_keys = 32 if head_dim > 128 else 64
    return (TILE_QUERIES + 4 * tile_keys) * (head_dim + 8) * 2


def paged_decode(
    backend: Backend,
    out: torch.Tensor,
    queries: torch.Tensor,
    cache: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: AttentionOptions,
    max_context: int,
) -> None:
    """Attention of single query tokens; `reference.attention.paged_attention` of one token each.

    Args:
        backend: where the tensors are.
        out: [num_queries, num_heads, head_dim], contiguous, written.
        queries: [num_queries, num_heads, head_dim], rotated; queries may be apart.
        cache: one layer, see `cache`.
        rows: query_rows [num_queries] int32, the row of the table each query belongs to; seq_lens [num_queries]
            int32, its position + 1, 0 for a hole (its result is 0); block_tables [num_rows, width] int32, entries
            whose positions no query sees are not read.
        options: see `AttentionOptions`.
        max_context: no seq_len is larger.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    num_queries, num_heads, stride = _check(queries, cache, options)
    query_rows, seq_lens, block_tables = rows
    shapes: tuple[tuple[int | None, ...], ...] = ((num_queries,), (num_queries,), (None, None))
    for tensor, name, shape in zip(rows, ("query_rows", "seq_lens", "block_tables"), shapes, strict=True):
        check_tensor(tensor, name, torch.int32, shape)
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    num_splits = _num_splits(max_context, options.window)
    check_tensor(out, "out", cache.dtype, (num_queries, num_heads, head_dim))
    partial = stats = None
    if num_splits > 1:
        partial = backend.allocate((num_queries, num_heads, num_splits, head_dim), torch.float32)
        stats = backend.allocate((num_queries, num_heads, num_splits, 2), torch.float32)
    tensors = (out, queries, cache, query_rows, seq_lens, block_tables, partial, stats)
    module = decode_module(scalar_name(cache, "cache"), head_dim, num_heads // num_kv_heads, block_size)
    backend.launch(_decode_launch(module, tensors, stride, options))
    if num_splits > 1:
        sizes = (np.int32(num_heads), np.int32(num_splits), np.int32(options.window))
        merge = Launch(
            module=module,
            kernel="paged_decode_merge",
            grid=(num_heads, num_queries, 1),
            num_threads=_THREADS,
            arguments=(out, partial, stats, seq_lens, *sizes),
        )
        backend.launch(merge)


def _decode_launch(
    module: Module, tensors: tuple[torch.Tensor | None, ...], stride: int, options: AttentionOptions
) -> Launch:
    """The launch of `paged_decode` over checked tensors, in the order of its parameters."""
    out, _, cache, _, _, block_tables, partial, _ = tensors
    assert out is not None
    assert cache is not None
    assert block_tables is not None
    num_queries, num_heads, _ = out.shape
    num_kv_heads = cache.shape[2]
    num_splits = 1 if partial is None else partial.shape[2]
    tiles_of_group = -(-num_heads // num_kv_heads // MAX_GROUP)
    return Launch(
        module=module,
        kernel="paged_decode",
        grid=(num_kv_heads * tiles_of_group, num_queries, num_splits),
        num_threads=_THREADS,
        arguments=(
            *tensors,
            np.int64(stride),
            *(np.int32(size) for size in (block_tables.shape[1], num_heads, num_kv_heads, num_splits)),
            *(np.float32(options.scale), np.float32(options.soft_cap), np.int32(options.window)),
        ),
    )


def _num_splits(max_context: int, window: int) -> int:
    """Splits the longest context may have; a window that begins inside a split reaches into one more."""
    num_splits = max(-(-max_context // SPLIT_TOKENS), 1)
    return min(num_splits, -(-(window - 1) // SPLIT_TOKENS) + 1) if window else num_splits


def chunk_tiles(query_start_loc: NDArray[np.int32], group: int) -> NDArray[np.int32]:
    """Returns [num_tiles, 2]: the row and the first packed query of each block of `paged_chunk`.

    Args:
        query_start_loc: [num_rows + 1], token offsets of the rows.
        group: query heads a KV head.
    """
    packed = np.diff(query_start_loc).astype(np.int64) * group
    num_tiles = -(-packed // TILE_QUERIES)
    rows = np.repeat(np.arange(len(packed)), num_tiles)
    firsts = np.arange(len(rows)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    return np.stack([rows, firsts * TILE_QUERIES], axis=1).astype(np.int32)


def paged_chunk(
    backend: Backend,
    out: torch.Tensor,
    queries: torch.Tensor,
    cache: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    options: AttentionOptions,
) -> None:
    """Causal attention of rows of several tokens; `reference.attention.paged_attention` row by row.

    Args:
        backend: where the tensors are.
        out: [num_tokens, num_heads, head_dim], contiguous, written.
        queries: [num_tokens, num_heads, head_dim] float16 or bfloat16, rotated, row by row; tokens may be apart.
        cache: one layer, see `cache`; the rows' keys and values are already in it.
        rows: tiles [num_tiles, 2] int32 from `chunk_tiles`; query_start_loc [num_rows + 1] int32; seq_lens
            [num_rows] int32, last position + 1; block_tables [num_rows, width] int32.
        options: see `AttentionOptions`.

    Raises:
        KernelArgumentError: a tensor is not as said here, or float32 (take `paged_decode`, a query a token).
    """
    num_tokens, num_heads, stride = _check(queries, cache, options)
    tiles, query_start_loc, seq_lens, block_tables = rows
    check_tensor(tiles, "tiles", torch.int32, (None, 2))
    check_tensor(seq_lens, "seq_lens", torch.int32, (None,))
    check_tensor(query_start_loc, "query_start_loc", torch.int32, (len(seq_lens) + 1,))
    check_tensor(block_tables, "block_tables", torch.int32, (len(seq_lens), None))
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    if cache.dtype == torch.float32 or head_dim % 16:
        message = f"tensor cores take 16-bit heads of a multiple of 16 values, not {cache.dtype} of {head_dim}"
        raise KernelArgumentError(message)
    check_tensor(out, "out", cache.dtype, (num_tokens, num_heads, head_dim))
    backend.launch(
        Launch(
            module=chunk_module(scalar_name(cache, "cache"), head_dim, block_size),
            kernel="paged_chunk",
            grid=(len(tiles), num_kv_heads, 1),
            num_threads=_THREADS,
            shared_bytes=chunk_shared_bytes(head_dim),
            arguments=(
                *(out, queries, cache, tiles, query_start_loc, seq_lens, block_tables, np.int64(stride)),
                *(np.int32(block_tables.shape[1]), np.int32(num_heads), np.int32(num_kv_heads)),
                *(np.float32(options.scale), np.float32(options.soft_cap), np.int32(options.window)),
            ),
        )
    )


def _check(queries: torch.Tensor, cache: torch.Tensor, options: AttentionOptions) -> tuple[int, int, int]:
    """Returns (tokens, query heads, values between tokens)."""
    check_tensor(cache, "cache", cache.dtype, (None, 2, None, None, None))
    check_vectors(cache, "cache")
    num_kv_heads, head_dim = cache.shape[2], cache.shape[4]
    check_head(head_dim, cache.element_size())
    stride = token_stride(queries, "queries", cache.dtype, (None, None, head_dim))
    num_tokens, num_heads = queries.shape[:2]
    if num_heads % num_kv_heads or head_dim > _MAX_HEAD_DIM or options.window < 0 or options.soft_cap < 0:
        message = f"{num_heads} heads over {num_kv_heads} KV heads of {head_dim} values, {options}"
        raise KernelArgumentError(message)
    return num_tokens, num_heads, stride
