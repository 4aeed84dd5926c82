"""Slot cells: what each slot sampled last and where it will be fed. Kept on the host: the CPU is the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.block_tables import GroupLayout
from stepahead.worker.runner import LAST_SAMPLE, NO_POSITION, StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedStep:
    """A batch with its holes taken out and every token id real. `rows[i]` is the batch's row of kept row i."""

    rows: NDArray[np.int64]  # [num_kept_rows], ascending
    token_ids: NDArray[np.int64]  # [num_kept_tokens]
    positions: NDArray[np.int64]  # [num_kept_tokens]
    slot_mapping: NDArray[np.int64]  # [num_kept_tokens]
    query_start_loc: NDArray[np.int32]  # [num_kept_rows + 1]
    seq_lens: NDArray[np.int32]  # [num_kept_rows]
    block_tables: NDArray[np.int32]  # [num_kept_rows, width]
    hole_rows: frozenset[int]
    more_groups: tuple[GroupLayout, ...] = ()
    """Of the KV groups 1 and up; `slot_mapping`, `block_tables` and `floors` are group 0's."""
    floors: NDArray[np.int32] | None = None  # [num_kept_rows], see `StepLayout.floors`


class SlotCells:
    """(token, position) per slot."""

    def __init__(self, num_slots: int) -> None:
        self.token_ids = np.zeros(num_slots, dtype=np.int64)
        self.positions = np.full(num_slots, NO_POSITION, dtype=np.int64)

    def reset(self) -> None:
        """Empties every cell."""
        self.positions.fill(NO_POSITION)

    def resolve(self, batch: StepBatch) -> ResolvedStep:
        """Invalidates the cells the batch names, then fills in LAST_SAMPLE tokens and finds the holes."""
        if len(batch.invalidated_slots):
            self.positions[batch.invalidated_slots] = NO_POSITION
        counts = np.diff(batch.query_start_loc)
        one_each = len(batch.token_ids) == batch.num_rows
        slot_of_token = batch.slots if one_each else np.repeat(batch.slots, counts)
        fed_by_cell = batch.token_ids == LAST_SAMPLE
        token_ids = np.where(fed_by_cell, self.token_ids[slot_of_token], batch.token_ids)
        mismatch = fed_by_cell & (self.positions[slot_of_token] != batch.positions)
        if not mismatch.any():
            return ResolvedStep(
                rows=np.arange(batch.num_rows),
                token_ids=token_ids,
                positions=batch.positions,
                slot_mapping=batch.slot_mapping,
                query_start_loc=batch.query_start_loc,
                seq_lens=batch.seq_lens,
                block_tables=batch.block_tables,
                hole_rows=frozenset(),
                more_groups=batch.more_groups,
                floors=batch.floors,
            )
        row_of_token = np.repeat(np.arange(batch.num_rows), counts)
        holes = np.zeros(batch.num_rows, dtype=np.bool_)
        holes[row_of_token[mismatch]] = True
        kept_tokens = ~holes[row_of_token]
        rows = np.flatnonzero(~holes)
        starts = np.concatenate([[0], np.cumsum(counts[rows])]).astype(np.int32)
        return ResolvedStep(
            rows=rows,
            token_ids=token_ids[kept_tokens],
            positions=batch.positions[kept_tokens],
            slot_mapping=batch.slot_mapping[kept_tokens],
            query_start_loc=starts,
            seq_lens=batch.seq_lens[rows],
            block_tables=batch.block_tables[rows],
            hole_rows=frozenset(np.flatnonzero(holes).tolist()),
            more_groups=tuple(
                GroupLayout(
                    each.slot_mapping[kept_tokens],
                    each.block_tables[rows],
                    None if each.floors is None else each.floors[rows],
                )
                for each in batch.more_groups
            ),
            floors=None if batch.floors is None else batch.floors[rows],
        )

    def store(self, slots: NDArray[np.int32], token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Writes cells: the token each slot sampled and the position it will be fed at."""
        self.token_ids[slots] = token_ids
        self.positions[slots] = positions
