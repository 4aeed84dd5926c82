"""A step's layout as the attention kernels need it, on the host, and how it reaches the device in one copy.

    tokens, reordered   rows of several tokens, row by row | rows of one token
                        paged_chunk                        | paged_decode

float32 has no tensor-core path: there every token is a query of `paged_decode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cuda.attention import chunk_tiles
from stepahead.kernels.cuda.backend import Backend
from stepahead.kernels.cuda.checks import VECTOR_BYTES
from stepahead.kernels.ops import StepLayout

_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """What a step's kernels read, in the device's token order; all on the host."""

    token_order: NDArray[np.int64]  # [num_tokens], see `PreparedStep`
    positions: NDArray[np.int64]  # [num_tokens]
    slot_mapping: NDArray[np.int64]  # [num_tokens]
    rows: NDArray[np.int32]  # [num_tokens], the row of each token
    num_chunk_tokens: int
    tiles: NDArray[np.int32]  # of the first num_chunk_tokens tokens, see `paged_chunk`, like the next three
    chunk_start_loc: NDArray[np.int32]
    chunk_lens: NDArray[np.int32]
    chunk_tables: NDArray[np.int32]
    block_tables: NDArray[np.int32]  # [num_rows, width]
    max_context: int
    """No token of a row of its own sees more positions."""


def arrange(layout: StepLayout, group: int, *, by_chunk: bool) -> StepArrays:
    """Returns a layout's arrays.

    Args:
        layout: of the step.
        group: query heads a KV head.
        by_chunk: whether rows of several tokens go to `paged_chunk`.
    """
    counts = np.diff(layout.query_start_loc).astype(np.int64)
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    is_chunk = counts > 1 if by_chunk else np.zeros(len(counts), np.bool_)
    chunk_rows = np.flatnonzero(is_chunk)
    in_chunk = is_chunk[row_of_token]
    order = np.concatenate([np.flatnonzero(in_chunk), np.flatnonzero(~in_chunk)])
    start_loc = np.concatenate([[0], np.cumsum(counts[chunk_rows])]).astype(np.int32)
    num_chunk_tokens = int(start_loc[-1])
    positions = layout.positions[order]
    return StepArrays(
        token_order=order,
        positions=positions,
        slot_mapping=layout.slot_mapping[order],
        rows=row_of_token[order].astype(np.int32),
        num_chunk_tokens=num_chunk_tokens,
        tiles=chunk_tiles(start_loc, group),
        chunk_start_loc=start_loc,
        chunk_lens=layout.seq_lens[chunk_rows],
        chunk_tables=layout.block_tables[chunk_rows],
        block_tables=layout.block_tables,
        max_context=int(positions[num_chunk_tokens:].max(initial=0)) + 1,
    )


class PackedArrays:
    """Arrays laid out one behind the other in one run of bytes, each from a multiple of 16.

    Where an array lies depends on the shapes and dtypes before it alone, so that arrays of the same shapes come to
    lie at the same places: what a recorded graph reads.

    Args:
        arrays: int64, int32, float32 or uint8.
    """

    def __init__(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        end = 0
        for name, array in arrays.items():
            self._places[name] = (end, array.nbytes, _DTYPES[array.dtype], array.shape)
            end += -(-array.nbytes // VECTOR_BYTES) * VECTOR_BYTES
        self.data = np.zeros(end, np.uint8)
        for (start, size, _, _), array in zip(self._places.values(), arrays.values(), strict=True):
            self.data[start : start + size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def upload(self, backend: Backend, into: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Copies everything to the device at once; returns the arrays there, by name.

        Args:
            backend: the device.
            into: memory of at least that many bytes; None: new memory.
        """
        return self.views(backend.upload(self.data, None if into is None else into[: len(self.data)]))

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the arrays by name where they lie in memory that holds, or will hold, the run of bytes."""
        return {
            name: memory[start : start + size].view(dtype).view(shape)
            for name, (start, size, dtype, shape) in self._places.items()
        }
