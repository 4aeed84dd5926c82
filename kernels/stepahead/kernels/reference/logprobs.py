"""Log probabilities of chosen tokens: the definition.

A distribution is given by *log weights*: [vocab_size] float32, -infinity for ids of probability 0. RAW values take
the model's untouched logits as log weights, PROCESSED values those of `sampling.processed_log_weights`.

* value: log weight - log(sum of exp(log weights)), at least LOWEST, so that every value is finite.
* rank: 1 + the number of ids with a strictly larger log weight.
* best ids: at most top_k, by log weight descending, lower ids first on a tie; never an id of probability 0.

Log weights that hold NaN or +infinity, or no finite value, describe no distribution: LOWEST, rank 1, no best ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOWEST = -1e4
"""Reported in place of anything smaller, -infinity included."""

MAX_TOP_K = 20
"""Best ids that may be asked for."""


@dataclass(frozen=True, slots=True)
class LogprobEntries:
    """Log probabilities of some tokens as columns; best ids lie entry after entry."""

    values: NDArray[np.float32]  # [num_entries], finite
    ranks: NDArray[np.int64]  # [num_entries], 1 and up
    top_counts: NDArray[np.int64]  # [num_entries]
    top_ids: NDArray[np.int64]  # [sum of top_counts]
    top_values: NDArray[np.float32]  # [sum of top_counts], finite


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token, and the best ids beside it."""

    value: float
    rank: int
    top_ids: NDArray[np.int64]
    top_values: NDArray[np.float64]


NOT_A_DISTRIBUTION = TokenLogprob(LOWEST, 1, np.zeros(0, np.int64), np.zeros(0))


def token_logprob(log_weights: NDArray[np.float32], token_id: int, top_k: int) -> TokenLogprob:
    """Returns the log probability of one token.

    Args:
        log_weights: [vocab_size] float32.
        token_id: the token.
        top_k: best ids asked for, 0 and up.
    """
    weights = log_weights.astype(np.float64)
    if np.isnan(weights).any() or not np.isfinite(weights.max()):
        return NOT_A_DISTRIBUTION
    largest = weights.max()
    values = np.maximum(weights - (largest + np.log(np.exp(weights - largest).sum())), LOWEST)
    order = np.argsort(-weights, kind="stable")
    best = order[: min(top_k, int(np.isfinite(weights).sum()))]
    rank = 1 + int(np.count_nonzero(weights > weights[token_id]))
    return TokenLogprob(float(values[token_id]), rank, best, values[best])


def as_entries(tokens: list[TokenLogprob]) -> LogprobEntries:
    """Returns single tokens as columns."""
    return LogprobEntries(
        values=np.array([token.value for token in tokens], np.float32),
        ranks=np.array([token.rank for token in tokens], np.int64),
        top_counts=np.array([len(token.top_ids) for token in tokens], np.int64),
        top_ids=np.concatenate([np.zeros(0, np.int64), *(token.top_ids for token in tokens)]),
        top_values=np.concatenate([np.zeros(0), *(token.top_values for token in tokens)]).astype(np.float32),
    )
