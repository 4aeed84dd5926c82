"""Samples the rows of a step: one vectorised argmax for the plain greedy ones, row by row for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.cpu.logprobs import row_logprobs
from stepahead.kernels.cpu.sampling import processed_log_weights, sample_row
from stepahead.kernels.reference.logprobs import LogprobEntries
from stepahead.kernels.reference.philox import draw_uniform
from stepahead.kernels.reference.sampling import GREEDY_BELOW, RowSampling
from stepahead.worker.runner import AskedLogprobs, SampleStatus, SamplingColumns, StepSamples


def uniform_draws(sampling: SamplingColumns) -> NDArray[np.float64]:
    """Returns [num_samples] float64: each row's draw, a function of its seed, choice and output index only."""
    return draw_uniform(sampling.seed, sampling.choice_index, sampling.output_index)


@dataclass(frozen=True, slots=True)
class LargestLogits:
    """Each row's largest logit. It tells of all others: it is NaN if any of them is."""

    ids: NDArray[np.int64]  # [num_samples], the lowest id on a tie
    values: NDArray[np.float32]  # [num_samples]

    def rows(self, chosen: NDArray[np.int64]) -> LargestLogits:
        """Returns some rows, in the order given."""
        return LargestLogits(self.ids[chosen], self.values[chosen])


def find_largest(logits: NDArray[np.float32]) -> LargestLogits:
    """Returns the largest of [num_samples, vocab_size] logits."""
    ids = logits.argmax(axis=1)  # argmax points at a NaN if there is one
    return LargestLogits(ids, logits[np.arange(len(ids)), ids])


class DrawRows(Protocol):
    """Draws a token for each of some rows that nothing restricts and whose largest logit is finite."""

    def __call__(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.int64],
        largest: NDArray[np.float32],
        sampling: SamplingColumns,
        uniform: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """Returns [len(rows)] token ids; all but `rows` is by row of the logits."""
        ...


def sample_logits(
    logits: NDArray[np.float32],
    sampling: SamplingColumns,
    largest: LargestLogits | None = None,
    draw: DrawRows | None = None,
) -> StepSamples:
    """Samples every row.

    Args:
        logits: [num_samples, vocab_size] float32, contiguous.
        sampling: the rows' parameters.
        largest: of the logits, if somebody found it already.
        draw: draws many rows at once, if somebody can.

    Returns:
        Tokens and statuses, see `reference.sampling` for the order of operations.
    """
    num_samples = len(sampling)
    token_ids = np.zeros(num_samples, dtype=np.int64)
    status = np.zeros(num_samples, dtype=np.uint8)  # all OK
    free = np.ones(num_samples, np.bool_)
    for restrictions in (sampling.suppressed, sampling.masks, sampling.rule_states):
        if restrictions:
            free &= np.fromiter((entry is None for entry in restrictions), np.bool_, num_samples)
    plain = free & (sampling.temperature < GREEDY_BELOW)
    rows = np.flatnonzero(plain)
    if len(rows):
        if largest is None:
            best = find_largest(logits if len(rows) == num_samples else logits[rows])
        else:
            best = largest.rows(rows)
        token_ids[rows] = best.ids
        finite = np.isfinite(best.values)
        if not finite.all():
            status[rows[~finite]] = SampleStatus.NON_FINITE
    if len(rows) < num_samples:
        draws = uniform_draws(sampling)
        drawn = np.zeros(num_samples, np.bool_)
        if draw is not None and largest is not None:
            drawn = free & ~plain & np.isfinite(largest.values) & ~_described_processed(sampling)
            together = np.flatnonzero(drawn)
            if len(together):
                token_ids[together] = draw(logits, together, largest.values, sampling, draws)
        for row in np.flatnonzero(~plain & ~drawn).tolist():
            token, row_status = sample_row(logits[row], row_sampling(sampling, row, float(draws[row])))
            token_ids[row], status[row] = token, int(row_status)
    return StepSamples(token_ids, status)


def _described_processed(sampling: SamplingColumns) -> NDArray[np.bool_]:
    """Rows that ask for PROCESSED log probabilities: those must be of the very masses the row was drawn from."""
    if sampling.logprobs is None:
        return np.zeros(len(sampling), np.bool_)
    return sampling.logprobs.processed


def row_sampling(sampling: SamplingColumns, row: int, draw: float) -> RowSampling:
    """Returns one row of the columns, with what its rules mean now."""
    rules = sampling.rule_states[row] if sampling.rule_states else None
    return RowSampling(
        temperature=float(sampling.temperature[row]),
        top_k=int(sampling.top_k[row]),
        top_p=float(sampling.top_p[row]),
        min_p=float(sampling.min_p[row]),
        draw=draw,
        suppressed=sampling.suppressed[row] if sampling.suppressed else None,
        mask=sampling.masks[row] if sampling.masks else None,
        penalties=None if rules is None else rules.penalties(),
        banned=None if rules is None else rules.banned_ids(),
        allowed=None if rules is None else rules.allowed_ids,
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
        rule_states=_pick(sampling.rule_states, rows),
        logprobs=None
        if sampling.logprobs is None
        else AskedLogprobs(sampling.logprobs.top_k[rows], sampling.logprobs.processed[rows]),
    )


def describe_samples(
    logits: NDArray[np.float32], sampling: SamplingColumns, token_ids: NDArray[np.int64]
) -> LogprobEntries:
    """Returns the log probabilities of sampled tokens; rule states must be as they were when they were sampled.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous, of rows whose status is OK.
        sampling: the rows' parameters; all of them ask.
        token_ids: [num_rows], what each row sampled.
    """
    asked = sampling.logprobs
    assert asked is not None, "the caller looks whether a row asks"
    log_weights = list(logits)
    for row in np.flatnonzero(asked.processed).tolist():
        log_weights[row] = processed_log_weights(logits[row], row_sampling(sampling, row, 0.0))
    return row_logprobs(log_weights, token_ids, asked.top_k)


_Entry = TypeVar("_Entry")


def _pick(entries: tuple[_Entry, ...], rows: NDArray[np.int64]) -> tuple[_Entry, ...]:
    """Returns the entries of some rows; an empty column (nothing in any row) stays empty."""
    return tuple(entries[int(row)] for row in rows) if entries else ()
