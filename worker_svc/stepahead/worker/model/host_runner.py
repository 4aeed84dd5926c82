"""What every runner whose device is the CPU shares: cells, holes and the results of a step.

A subclass feeds tokens and chooses tokens; this class decides which rows take part. A hole never reaches it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from stepahead.worker.model.cells import ResolvedStep, SlotCells
from stepahead.worker.model.sampler import take_rows
from stepahead.worker.runner import (
    CacheShape,
    ModelFacts,
    ProgressCallback,
    RowTrace,
    SampleStatus,
    SamplingColumns,
    StepBatch,
    StepSamples,
)


class HostRunner(ABC):
    """Base of the CPU runners; implements `stepahead.worker.runner.Runner`.

    `sample` may be called with a batch whose `sample_rows` are some of those `forward` had: rows whose gate said
    SKIP are simply left out.
    """

    def __init__(self) -> None:
        self._cells = SlotCells(0)
        self._choice_of_row: dict[int, int] = {}
        self._hole_rows: frozenset[int] = frozenset()

    @abstractmethod
    def load(self, progress: ProgressCallback) -> ModelFacts:
        """See `Runner.load`."""

    @abstractmethod
    def _allocate_cache(self, shape: CacheShape) -> None:
        """Allocates the paged cache."""

    @abstractmethod
    def _change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """Copies blocks, then zeroes blocks."""

    @abstractmethod
    def _feed(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        """Feeds the tokens; `choice_rows` are the step's rows that `_choose` may be asked about, in its order."""

    @abstractmethod
    def _choose(self, choices: NDArray[np.int64], sampling: SamplingColumns) -> StepSamples:
        """Samples `choice_rows[choices]`; `sampling` has one row for each of them."""

    def _traces(self) -> tuple[RowTrace, ...]:
        """Of the step fed last, where the model is a teaching model."""
        return ()

    def allocate(self, shape: CacheShape) -> None:
        """See `Runner.allocate`."""
        self._cells = SlotCells(shape.num_slots)
        self._allocate_cache(shape)

    def reset(self) -> None:
        """See `Runner.reset`."""
        self._cells.reset()

    def forward(self, batch: StepBatch) -> None:
        """See `Runner.forward`."""
        step = self._cells.resolve(batch)
        if batch.copies or batch.zeroed_blocks:
            self._change_blocks(batch.copies, batch.zeroed_blocks)
        self._hole_rows = step.hole_rows
        chosen = [row for row in batch.sample_rows.tolist() if row not in step.hole_rows]
        self._choice_of_row = {row: choice for choice, row in enumerate(chosen)}
        if len(step.rows):
            self._feed(step, np.searchsorted(step.rows, np.asarray(chosen, dtype=np.int64)))

    def sample(self, batch: StepBatch) -> StepSamples:
        """See `Runner.sample`."""
        rows = batch.sample_rows.tolist()
        token_ids = np.zeros(len(rows), dtype=np.int64)
        status = np.full(len(rows), SampleStatus.POSITION_MISMATCH, dtype=np.uint8)
        asked = np.asarray([index for index, row in enumerate(rows) if row not in self._hole_rows], dtype=np.int64)
        if len(asked):
            choices = np.asarray([self._choice_of_row[rows[index]] for index in asked], dtype=np.int64)
            sampling = batch.sampling if len(asked) == len(rows) else take_rows(batch.sampling, asked)
            samples = self._choose(choices, sampling)
            token_ids[asked], status[asked] = samples.token_ids, samples.status
            written = batch.sample_rows[status == SampleStatus.OK]
            self._cells.store(
                batch.slots[written], token_ids[status == SampleStatus.OK], batch.seq_lens[written].astype(np.int64)
            )
        return StepSamples(token_ids, status, self._traces())
