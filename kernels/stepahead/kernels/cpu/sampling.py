"""Sampling on the host: `reference.sampling`, token for token, without sorting the vocabulary.

A full sort of 49,152 logits takes 4 ms, the whole row here about 0.1 ms. Two facts save the sort:

* the k-th largest of the maxima of any disjoint tiles is a lower bound of the k-th largest value, so ids below
  it cannot be among the k largest;
* ids of more than 1e-4 of the largest mass almost always reach top_p; where they do not, all ids are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.cpu.penalties import penalised
from stepahead.kernels.reference.sampling import (
    GREEDY_BELOW,
    TILE,
    RowSampling,
    RowStatus,
    allowed_ids,
    as_tiles,
    cumulative_mass,
    pick,
)

_HEAD_MASS = np.float32(1e-4)


@dataclass(frozen=True, slots=True)
class _Drawable:
    """What a row is drawn from. Ids not named, and those of mass 0, cannot be drawn."""

    ids: NDArray[np.int64] | None  # None: every id
    masses: NDArray[np.float32]  # of the ids


def sample_row(logits: NDArray[np.float32], sampling: RowSampling) -> tuple[int, RowStatus]:
    """Samples one row as `reference.sampling.sample_row` does.

    Args:
        logits: [vocab_size] float32, contiguous.
        sampling: the row's parameters.

    Returns:
        (token id, status); the id means nothing unless the status is OK.
    """
    scores, status = _restricted_scores(logits, sampling)
    if status != RowStatus.OK:
        return 0, status
    if sampling.temperature < GREEDY_BELOW:
        return int(np.argmax(scores)), RowStatus.OK
    drawable = _drawable(scores, sampling)
    if drawable.ids is None:
        tile, offset = pick(as_tiles(drawable.masses), sampling.draw)
        return tile * TILE + offset, RowStatus.OK
    tiles, used = _used_tiles(drawable.ids, drawable.masses)
    tile, offset = pick(tiles, sampling.draw)
    return int(used[tile]) * TILE + offset, RowStatus.OK


def processed_log_weights(logits: NDArray[np.float32], sampling: RowSampling) -> NDArray[np.float32]:
    """Returns what `reference.sampling.processed_log_weights` does; costs about as much as sampling the row.

    Args:
        logits: [vocab_size] float32, contiguous, of a row whose status was OK.
        sampling: the row's parameters, as they were when it was sampled.
    """
    scores, _ = _restricted_scores(logits, sampling)
    if sampling.temperature < GREEDY_BELOW:
        return scores
    drawable = _drawable(scores, sampling)
    ids = np.arange(len(scores)) if drawable.ids is None else drawable.ids
    ids = ids[drawable.masses > 0]
    log_weights = np.full(len(scores), -np.inf, np.float32)
    log_weights[ids] = (scores[ids] - scores.max()) / np.float32(sampling.temperature)
    return log_weights


def _restricted_scores(logits: NDArray[np.float32], sampling: RowSampling) -> tuple[NDArray[np.float32], RowStatus]:
    """Steps 1 and 3 to 6; may return `logits` itself."""
    largest = logits.max()
    if not np.isfinite(largest):  # max spreads NaN, so one number tells of NaN, +infinity and "all -infinity"
        return logits, RowStatus.NON_FINITE
    scores = logits if sampling.penalties is None else penalised(logits, sampling.penalties)
    if sampling.restricts:
        scores = np.where(allowed_ids(len(logits), sampling), scores, np.float32(-np.inf))
        if not np.isfinite(scores.max()):
            return logits, RowStatus.NOTHING_ALLOWED
    return scores, RowStatus.OK


def _drawable(scores: NDArray[np.float32], sampling: RowSampling) -> _Drawable:
    """Steps 7a to 7d."""
    largest = scores.max()
    if 0 < sampling.top_k < len(scores):
        kept = largest_ids(scores, sampling.top_k)
        kept_scores = scores[kept]
        masses = _masses(kept_scores, largest, sampling.temperature)
        if sampling.top_p < 1.0:
            place = _nucleus(kept_scores, masses, sampling.top_p * _total(kept, masses))
            kept, masses = kept[place], masses[place]
    else:
        kept, masses = None, _masses(scores, largest, sampling.temperature)
        if sampling.top_p < 1.0:
            total = float(cumulative_mass(as_tiles(masses))[-1])
            kept = _nucleus(scores, masses, sampling.top_p * total)
            masses = masses[kept]
    if sampling.min_p > 0.0:
        masses = np.where(masses < np.float32(sampling.min_p) * masses.max(), np.float32(0), masses)
    return _Drawable(kept, masses)


def _masses(scores: NDArray[np.float32], largest: np.float32, temperature: float) -> NDArray[np.float32]:
    return np.exp((scores - largest) / np.float32(temperature)).astype(np.float32, copy=False)


def _used_tiles(
    ids: NDArray[np.int64], masses: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns the tiles that hold any of the ids, and their numbers: leaving out empty tiles changes no sum."""
    used, place = np.unique(ids // TILE, return_inverse=True)
    tiles = np.zeros((len(used), TILE), dtype=np.float32)
    tiles[place, ids % TILE] = masses
    return tiles, used


def _total(ids: NDArray[np.int64], masses: NDArray[np.float32]) -> float:
    return float(cumulative_mass(_used_tiles(ids, masses)[0])[-1])


def largest_ids(scores: NDArray[np.float32], num_kept: int) -> NDArray[np.int64]:
    """Returns the ids of the `num_kept` largest scores, lower ids first on a tie, in ascending id order.

    Args:
        scores: [vocab_size] float32 without NaN.
        num_kept: 1 .. vocab_size - 1.
    """
    candidates = np.arange(len(scores))
    num_tiles = len(scores) // TILE
    if num_kept <= num_tiles:
        maxima = scores[: num_tiles * TILE].reshape(num_tiles, TILE).max(axis=1)
        bound = np.partition(maxima, num_tiles - num_kept)[num_tiles - num_kept]
        candidates = np.flatnonzero(scores >= bound)
    values = scores[candidates]
    smallest_kept = np.partition(values, len(values) - num_kept)[len(values) - num_kept]
    above = candidates[values > smallest_kept]
    level = candidates[values == smallest_kept][: num_kept - len(above)]
    return np.sort(np.concatenate([above, level]))


def _nucleus(scores: NDArray[np.float32], masses: NDArray[np.float32], wanted: float) -> NDArray[np.int64]:
    """Returns the indexes top-p keeps: the shortest run, largest first, whose mass reaches `wanted`."""
    for candidates in (np.flatnonzero(masses > _HEAD_MASS), np.flatnonzero(masses)):
        order = candidates[np.argsort(-scores[candidates], kind="stable")]
        cumulative = np.cumsum(masses[order], dtype=np.float64)
        num_kept = int(np.count_nonzero(cumulative < wanted)) + 1
        if num_kept <= len(order):
            return order[:num_kept]
    # Rounding: the sum in order stays an ulp under the sum by tiles. Everything with mass is kept.
    return np.flatnonzero(masses)
