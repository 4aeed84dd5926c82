"""Samples the rows of a step: one vectorised argmax for the plain greedy ones, row by row for the rest."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.cpu.sampling import sample_row
from stepahead.kernels.reference.philox import draw_uniform
from stepahead.kernels.reference.sampling import GREEDY_BELOW, RowSampling
from stepahead.worker.runner import SampleStatus, SamplingColumns, StepSamples


def uniform_draws(sampling: SamplingColumns) -> NDArray[np.float64]:
    """Returns [num_samples] float64: each row's draw, a function of its seed, choice and output index only."""
    return draw_uniform(sampling.seed, sampling.choice_index, sampling.output_index)


def sample_logits(logits: NDArray[np.float32], sampling: SamplingColumns) -> StepSamples:
    """Samples every row.

    Args:
        logits: [num_samples, vocab_size] float32, contiguous.
        sampling: the rows' parameters.

    Returns:
        Tokens and statuses, see `reference.sampling` for the order of operations.
    """
    num_samples = len(sampling)
    token_ids = np.zeros(num_samples, dtype=np.int64)
    status = np.full(num_samples, SampleStatus.OK, dtype=np.uint8)
    plain = sampling.temperature < GREEDY_BELOW
    for restrictions in (sampling.suppressed, sampling.masks):
        if restrictions:
            plain &= np.fromiter((entry is None for entry in restrictions), np.bool_, num_samples)
    rows = np.flatnonzero(plain)
    if len(rows):
        chosen = logits if len(rows) == num_samples else logits[rows]
        token_ids[rows] = chosen.argmax(axis=1)
        # The largest value tells it all: argmax points at a NaN if there is one.
        largest = chosen[np.arange(len(rows)), token_ids[rows]]
        status[rows[~np.isfinite(largest)]] = SampleStatus.NON_FINITE
    if len(rows) < num_samples:
        draws = uniform_draws(sampling)
        for row in np.flatnonzero(~plain).tolist():
            token, row_status = sample_row(logits[row], row_sampling(sampling, row, float(draws[row])))
            token_ids[row], status[row] = token, int(row_status)
    return StepSamples(token_ids, status)


def row_sampling(sampling: SamplingColumns, row: int, draw: float) -> RowSampling:
    """Returns one row of the columns."""
    return RowSampling(
        temperature=float(sampling.temperature[row]),
        top_k=int(sampling.top_k[row]),
        top_p=float(sampling.top_p[row]),
        min_p=float(sampling.min_p[row]),
        draw=draw,
        suppressed=sampling.suppressed[row] if sampling.suppressed else None,
        mask=sampling.masks[row] if sampling.masks else None,
    )


def take_rows(sampling: SamplingColumns, rows: NDArray[np.int64]) -> SamplingColumns:
    """Returns the columns of some rows, in the order given."""
    return SamplingColumns(
        temperature=sampling.temperature[rows],
        top_p=sampling.top_p[rows],
        top_k=sampling.top_k[rows],
        min_p=sampling.min_p[rows],
        seed=sampling.seed[rows],
        choice_index=sampling.choice_index[rows],
        output_index=sampling.output_index[rows],
        suppressed=_pick(sampling.suppressed, rows),
        masks=_pick(sampling.masks, rows),
    )


_Entry = TypeVar("_Entry")


def _pick(entries: tuple[_Entry, ...], rows: NDArray[np.int64]) -> tuple[_Entry, ...]:
    """Returns the entries of some rows; an empty column (nothing in any row) stays empty."""
    return tuple(entries[int(row)] for row in rows) if entries else ()
