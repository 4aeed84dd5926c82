"""A paged cache of one integer per token, with a poison value where nothing was written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepahead.worker.model.cells import ResolvedStep

POISON = np.int64(-(2**62))
"""In every kv_slot that was never written: whoever reads it reports the row NON_FINITE."""

KV_BYTES_PER_TOKEN = 8


class PagedIntegers:
    """[num_blocks, block_size] int64. As for real models, the first write to a block clears the rest of it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._values = np.full((num_blocks, block_size), POISON, dtype=np.int64)

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """Copies blocks, all sources read before the first write, then zeroes blocks."""
        if copies:
            sources, destinations = (list(ids) for ids in zip(*copies, strict=True))
            self._values[destinations] = self._values[sources]
        if zeroed:
            self._values[list(zeroed)] = 0

    def begin_blocks(self, slot_mapping: NDArray[np.int64]) -> None:
        """Poisons the blocks whose first kv_slot is among those about to be written."""
        begun = slot_mapping[slot_mapping % self.block_size == 0] // self.block_size
        self._values[begun] = POISON

    def write(self, slot_mapping: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        """Writes one value per kv_slot."""
        self._values.reshape(-1)[slot_mapping] = values

    def read(self, step: ResolvedStep, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Reads through block tables: the value at `positions[i]` of the step's row `rows[i]`."""
        blocks = step.block_tables[rows, positions // self.block_size]
        return self._values[blocks, positions % self.block_size]
