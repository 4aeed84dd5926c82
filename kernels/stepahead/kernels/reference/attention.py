"""The paged KV cache and attention over it.

KV layout, stated once. A layer's cache is one array

    [num_blocks, 2, num_kv_heads, block_size, head_dim]      axis 1: 0 = keys, 1 = values

so a (block, key or value, head) is one run of block_size * head_dim numbers: the unit a gather copies. Keys are
stored after rotation. `kv_slot` = block_id * block_size + offset names a token's place.

The first write to a block (offset 0) must find the block cleared: a reader of a part-filled block multiplies the
rest of it by weights of 0, and 0 x NaN, left there by a failed earlier owner, would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.block_tables import NO_SLOT
from stepahead.kernels.reference.elementwise import softcap
from stepahead.kernels.reference.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """In what the attention of one layer can differ from another's."""

    rope: RopeConfig | None
    """How queries and keys turn; None: not at all (NoPE)."""
    window: int | None = None
    """Keys a query sees, its own included: positions in (position - window, position]. None: all before it."""


def write_kv(
    cache: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    slot_mapping: NDArray[np.int64],
) -> None:
    """Stores the keys and values of a step's tokens.

    Args:
        cache: one layer's cache, written in place.
        keys: [num_tokens, num_kv_heads, head_dim] float32, rotated.
        values: as `keys`, not rotated.
        slot_mapping: [num_tokens] int64, a kv_slot for each token, or NO_SLOT: it is not kept.
    """
    kept = slot_mapping != NO_SLOT
    blocks, offsets = np.divmod(slot_mapping[kept], cache.shape[3])
    cache[blocks, 0, :, offsets] = keys[kept]
    cache[blocks, 1, :, offsets] = values[kept]


def paged_attention(
    queries: NDArray[np.float32],
    cache: NDArray[np.float32],
    block_table: NDArray[np.int32],
    seq_len: int,
    scale: float,
    *,
    window: int | None = None,
    floor: int = 0,
    cap: float | None = None,
) -> NDArray[np.float32]:
    """Returns causal attention of one row: its last `num_tokens` positions over all of its context.

    With w the softmax over the keys that a query sees: out = w(softcap(scale * q.k)) . v.

    Args:
        queries: [num_tokens, num_heads, head_dim] float32, rotated, of positions seq_len - num_tokens and up.
        cache: one layer's cache; the row's keys and values are already in it.
        block_table: [width] int32, the row's blocks in position order; entries past seq_len are not read.
        seq_len: last position + 1.
        scale: factor on the scores, usually 1 / sqrt(head_dim).
        window: keys a query sees, see `LayerAttention` (sliding window: Beltagy et al., 2020).
        floor: positions in front of it are not seen, whatever the window; at most the first query's.
        cap: bound on the scores, see `elementwise.softcap`; None: none.

    Returns:
        [num_tokens, num_heads, head_dim] float32.
    """
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    num_tokens, num_heads, _ = queries.shape
    blocks = cache[block_table[: -(-seq_len // block_size)]].astype(np.float64)
    keys, values = (np.swapaxes(blocks[:, i], 1, 2).reshape(-1, num_kv_heads, head_dim)[:seq_len] for i in range(2))
    group = num_heads // num_kv_heads  # query heads that share a KV head are neighbours
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries.astype(np.float64), keys) * scale
    if cap is not None:
        scores = softcap(scores, cap)
    positions = np.arange(seq_len - num_tokens, seq_len, dtype=np.int64)[:, None]
    key_positions = np.arange(seq_len)[None, :]
    hidden = (key_positions > positions) | (key_positions < floor)
    if window is not None:
        hidden |= key_positions <= positions - window
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values).astype(np.float32)
