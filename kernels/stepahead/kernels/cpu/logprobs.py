"""Log probabilities on the host: `reference.logprobs` without sorting the vocabulary or widening it to float64."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.cpu.sampling import largest_ids
from stepahead.kernels.reference.logprobs import (
    LOWEST,
    NOT_A_DISTRIBUTION,
    LogprobEntries,
    TokenLogprob,
    as_entries,
)


def token_logprob(log_weights: NDArray[np.float32], token_id: int, top_k: int) -> TokenLogprob:
    """Returns what `reference.logprobs.token_logprob` does; values agree to float32's precision.

    Args:
        log_weights: [vocab_size] float32, contiguous.
        token_id: the token.
        top_k: best ids asked for, 0 and up.
    """
    largest = log_weights.max()
    if not np.isfinite(largest):  # max spreads NaN, so one number tells of NaN, +infinity and "all -infinity"
        return NOT_A_DISTRIBUTION
    total = np.exp(log_weights - largest).sum(dtype=np.float64)
    log_total = float(largest) + float(np.log(total))
    weight = log_weights[token_id]
    best = _best_ids(log_weights, top_k)
    return TokenLogprob(
        value=max(float(weight) - log_total, LOWEST),
        rank=1 + int(np.count_nonzero(log_weights > weight)),
        top_ids=best,
        top_values=np.maximum(log_weights[best].astype(np.float64) - log_total, LOWEST),
    )


def row_logprobs(
    log_weights: Iterable[NDArray[np.float32]], token_ids: NDArray[np.int64], top_k: NDArray[np.integer]
) -> LogprobEntries:
    """Returns one entry per row.

    Args:
        log_weights: num_rows times [vocab_size] float32, contiguous.
        token_ids: [num_rows] int64, the token of each.
        top_k: [num_rows], best ids asked for.
    """
    rows = zip(log_weights, token_ids.tolist(), top_k.tolist(), strict=True)
    return as_entries([token_logprob(weights, token_id, most) for weights, token_id, most in rows])


def _best_ids(log_weights: NDArray[np.float32], top_k: int) -> NDArray[np.int64]:
    if top_k == 0:
        return np.zeros(0, np.int64)
    best = largest_ids(log_weights, top_k) if top_k < len(log_weights) else np.arange(len(log_weights))
    best = best[np.isfinite(log_weights[best])]
    return best[np.argsort(-log_weights[best], kind="stable")]
