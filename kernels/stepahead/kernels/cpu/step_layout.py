"""A step's layout as the CPU attention needs it: indexes for the gathers, masks, and a token order.

    tokens, reordered   chunk a (5) | chunk b (2) | decode bucket 0 (4 rows) | decode bucket 1 (9 rows)
                        row by row, in tiles        rows of similar length, one matrix product each

Rows of one token are sorted by length and cut into buckets; a bucket is padded to its longest row with the null
block, which is zero and belongs to nobody; it also stands for what has left a window. Reordering the tokens once
spares every layer a gather. Each group of layers has block tables and so indexes of its own; the rest is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.block_tables import NO_SLOT, NULL_BLOCK
from stepahead.kernels.cpu.host_arrays import as_tensor
from stepahead.kernels.ops import AttentionShape, StepLayout

LayerView = tuple[int, int | None]
"""What decides which keys a layer sees: its group and its window."""

MAX_PADDED_BLOCKS = 48
"""Blocks a bucket may waste: about what starting another bucket costs in every layer (measured, 2 cores)."""

CHUNK_TILE = 128
"""Query tokens per tile of a chunk: keys past the tile's end are not touched at all."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Rows of one token each, padded to the same number of blocks."""

    first_token: int
    num_rows: int
    num_keys: int
    gather: tuple[torch.Tensor, ...]
    """By group: [2 * num_rows * num_kv_heads * num_blocks] rows of the cache, see `attention`."""
    biases: Mapping[LayerView, torch.Tensor]
    """[num_rows * num_kv_heads, 1, num_keys], 0 or -infinity."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of several tokens."""

    first_token: int
    num_tokens: int
    num_keys: int
    """Keys gathered: a multiple of the block size."""
    seq_len: int
    gather: tuple[torch.Tensor, ...]
    """By group: [2 * num_kv_heads * num_blocks]."""
    floors: tuple[int, ...]
    """By group: the first position that is seen."""


@dataclass(frozen=True, slots=True)
class CpuStep:
    """A prepared step."""

    token_order: NDArray[np.int64]
    turns: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(cos, sin) of each set of tables: [num_tokens, 1, head_dim], the first half of sin negated."""
    write_index: tuple[torch.Tensor, ...]
    """By group: [num_written * 2 * num_kv_heads] rows of the cache seen as head vectors."""
    written: tuple[torch.Tensor | None, ...]
    """By group: [num_written] tokens of the step whose keys and values are kept; None: all."""
    chunks: tuple[Chunk, ...]
    buckets: tuple[DecodeBucket, ...]


def cut_buckets(num_blocks: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cuts rows sorted by descending block count into (first, end) runs that waste little padding."""
    runs: list[tuple[int, int]] = []
    first, padded = 0, 0
    for row, count in enumerate(num_blocks.tolist()):
        padded += int(num_blocks[first]) - count
        if padded > MAX_PADDED_BLOCKS:
            runs.append((first, row))
            first, padded = row, 0
    if len(num_blocks):
        runs.append((first, len(num_blocks)))
    return runs


def gather_index(blocks: NDArray[np.int64], num_kv_heads: int) -> torch.Tensor:
    """Returns the cache rows (each one block of one head) that give [2, rows, kv heads, keys, head_dim].

    Args:
        blocks: [num_rows, num_blocks] block ids.
        num_kv_heads: heads of the cache.
    """
    parts = np.arange(2)[:, None, None, None]
    heads = np.arange(num_kv_heads)[None, None, :, None]
    rows = (blocks[None, :, None, :] * 2 + parts) * num_kv_heads + heads
    return as_tensor(rows.reshape(-1))


class LayoutBuilder:
    """Builds `CpuStep`s; holds what does not change between steps."""

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        null_blocks: Sequence[int],
        views: Sequence[LayerView],
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """Takes, beside sizes, a null block per group, what each layer sees, and each set of tables (cos, sin).

        Tables are [num_positions, head_dim], the sign in sin.
        """
        self._num_kv_heads = shape.num_kv_heads
        self._block_size = block_size
        self._null_blocks = tuple(null_blocks)
        self._tables = tables
        self._dtype = dtype
        self._views = sorted(set(views), key=str)

    def build(self, layout: StepLayout) -> CpuStep:
        """Returns the step's indexes and masks."""
        starts = layout.query_start_loc[:-1].astype(np.int64)
        counts = np.diff(layout.query_start_loc).astype(np.int64)
        num_blocks = -(-layout.seq_lens.astype(np.int64) // self._block_size)
        is_chunk = counts > 1
        chunk_rows = np.flatnonzero(is_chunk)
        decode_rows = np.flatnonzero(~is_chunk)
        decode_rows = decode_rows[np.argsort(-num_blocks[decode_rows], kind="stable")]

        spans: list[NDArray[np.int64]] = [
            np.arange(starts[row], starts[row] + counts[row], dtype=np.int64) for row in chunk_rows.tolist()
        ]
        order = np.concatenate([*spans, starts[decode_rows]])
        chunks: list[Chunk] = []
        first_token = 0
        for row in chunk_rows.tolist():
            chunks.append(self._chunk(layout, row, first_token, int(num_blocks[row])))
            first_token += int(counts[row])
        buckets: list[DecodeBucket] = []
        for first, end in cut_buckets(num_blocks[decode_rows]):
            buckets.append(self._bucket(layout, decode_rows[first:end], first_token, num_blocks))
            first_token += end - first
        positions = as_tensor(layout.positions[order])
        writes = [self._writes(mapping[order]) for mapping in slot_mappings(layout)]
        return CpuStep(
            token_order=order,
            turns=tuple(
                (cos.index_select(0, positions).unsqueeze(1), sin.index_select(0, positions).unsqueeze(1))
                for cos, sin in self._tables
            ),
            write_index=tuple(index for index, _ in writes),
            written=tuple(tokens for _, tokens in writes),
            chunks=tuple(chunks),
            buckets=tuple(buckets),
        )

    def _chunk(self, layout: StepLayout, row: int, first_token: int, num_blocks: int) -> Chunk:
        return Chunk(
            first_token=first_token,
            num_tokens=int(layout.query_start_loc[row + 1] - layout.query_start_loc[row]),
            num_keys=num_blocks * self._block_size,
            seq_len=int(layout.seq_lens[row]),
            gather=self._gathers(layout, np.array([row]), np.ones((1, num_blocks), np.bool_)),
            floors=tuple(0 if floors is None else int(floors[row]) for floors in _floors(layout)),
        )

    def _bucket(
        self, layout: StepLayout, rows: NDArray[np.int64], first_token: int, num_blocks: NDArray[np.int64]
    ) -> DecodeBucket:
        widest = int(num_blocks[rows[0]])
        used = np.arange(widest) < num_blocks[rows, None]
        num_keys = widest * self._block_size
        lens, floors = layout.seq_lens[rows], [None if each is None else each[rows] for each in _floors(layout)]
        return DecodeBucket(
            first_token=first_token,
            num_rows=len(rows),
            num_keys=num_keys,
            gather=self._gathers(layout, rows, used),
            biases={view: self._bias(lens, floors[view[0]], num_keys, view[1]) for view in self._views},
        )

    def _gathers(
        self, layout: StepLayout, rows: NDArray[np.int64], used: NDArray[np.bool_]
    ) -> tuple[torch.Tensor, ...]:
        """Returns, by group, what gathers the used blocks of some rows, and the null block for the others."""
        gathers: list[torch.Tensor] = []
        tables = [layout.block_tables, *(group.block_tables for group in layout.more_groups)]
        for table, null_block in zip(tables, self._null_blocks, strict=True):
            blocks = table[rows, : used.shape[1]]
            blocks = np.where(used & (blocks != NULL_BLOCK), blocks, null_block).astype(np.int64)
            gathers.append(gather_index(blocks, self._num_kv_heads))
        return tuple(gathers)

    def _bias(
        self, seq_lens: NDArray[np.int32], floors: NDArray[np.int32] | None, num_keys: int, window: int | None
    ) -> torch.Tensor:
        """Returns what hides keys from rows of one token, the last of their sequences."""
        keys, ends = np.arange(num_keys), seq_lens[:, None].astype(np.int64)
        visible = keys < ends
        if window is not None:
            visible &= keys >= ends - window
        if floors is not None:
            visible &= keys >= floors[:, None]
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))
        return as_tensor(np.repeat(bias, self._num_kv_heads, axis=0)[:, None, :]).to(self._dtype)

    def _writes(self, slot_mapping: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns where keys and values go, and whose they are: None for every token's."""
        written: torch.Tensor | None = None
        kept = slot_mapping != NO_SLOT
        if not kept.all():
            written = as_tensor(np.flatnonzero(kept))
            slot_mapping = slot_mapping[kept]
        blocks, offsets = np.divmod(slot_mapping, self._block_size)
        vectors = 2 * self._num_kv_heads
        rows = (blocks[:, None] * vectors + np.arange(vectors)) * self._block_size + offsets[:, None]
        return as_tensor(rows.reshape(-1)), written


def slot_mappings(layout: StepLayout) -> list[NDArray[np.int64]]:
    """Returns where each group keeps the tokens: [num_tokens] kv_slots or NO_SLOT, group 0 first."""
    return [layout.slot_mapping, *(group.slot_mapping for group in layout.more_groups)]


def _floors(layout: StepLayout) -> list[NDArray[np.int32] | None]:
    """Returns the floors of each group, group 0 first."""
    return [layout.floors, *(group.floors for group in layout.more_groups)]
