"""Sampling of one row of logits: the order of operations, stated once.

1. A row that holds NaN or +infinity, or no finite value, is NON_FINITE. (-infinity is a legal "never".)
2. RAW log probabilities are those of these untouched logits (`reference.logprobs`).
3. Repetition penalty, on every id of the history, the prompt included (3 to 5, bad words: `reference.penalties`).
4. Frequency and presence penalty, on ids that occur among the outputs.
5. Biases.
6. Not allowed are: ids outside the mask, suppressed ids, the last id of a bad word that the newest outputs have
   begun, ids outside the allowed list, logits of -infinity. Nothing left: NOTHING_ALLOWED.
7. temperature < 1e-5 is greedy: the allowed id with the largest logit, the lowest id on a tie. Otherwise:
   a. Mass of an allowed id: exp((logit - largest allowed logit) / temperature), in float32.
   b. top-k: the k largest logits stay, lower ids first on a tie. 0, and k >= vocabulary size, are off.
   c. top-p: of the ids left, by (logit descending, id ascending), the shortest run whose mass reaches
      top_p x the mass left after b (summed as in e) stays; at least one id. 1 is off.
   d. min-p: ids with mass < min_p x the largest mass go. 0 is off.
   e. Draw: masses in id order, summed in float64 per tile of 256 ids and then across tiles; the token is the first
      id whose cumulative mass exceeds draw x total.

PROCESSED log probabilities are those of the distribution drawn from, the masses after d; of a greedy row, those of
the softmax of the logits after 6 (a temperature of 1).

Each row is computed alone, so batch neighbours cannot change it. Order a to d is that of the `transformers`
library's logits warpers (temperature, top-k, top-p, min-p), 3 that of its processors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.reference.penalties import RowPenalties, penalised

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32."""

TILE = 256
"""Ids per partial sum of step 7e."""


class RowStatus(IntEnum):
    """Outcome of a row; the values are those of the worker's SampleStatus."""

    OK = 0
    NON_FINITE = 1
    NOTHING_ALLOWED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How to sample one row. `draw` is the uniform number of `philox.draw_uniform`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draw: float = 0.0
    suppressed: NDArray[np.int64] | None = None
    mask: NDArray[np.uint8] | None = None
    """Packed bits: bit i % 8 of byte i // 8 allows id i."""
    penalties: RowPenalties | None = None
    banned: NDArray[np.int64] | None = None
    """The last ids of bad words begun."""
    allowed: NDArray[np.int64] | None = None
    """None: every id."""

    @property
    def restricts(self) -> bool:
        """Whether step 6 takes ids away."""
        return not (self.mask is self.suppressed is self.banned is self.allowed is None)


def allowed_ids(vocab_size: int, sampling: RowSampling) -> NDArray[np.bool_]:
    """Returns [vocab_size] bool: the ids that the mask and the lists of step 6 leave."""
    if sampling.mask is None:
        allowed = np.ones(vocab_size, dtype=np.bool_)
    else:
        allowed = np.unpackbits(sampling.mask, count=vocab_size, bitorder="little").astype(np.bool_)
    if sampling.allowed is not None:
        listed = np.zeros(vocab_size, dtype=np.bool_)
        listed[sampling.allowed] = True
        allowed &= listed
    for forbidden in (sampling.suppressed, sampling.banned):
        if forbidden is not None:
            allowed[forbidden] = False
    return allowed


def as_tiles(masses: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the masses as [num_tiles, TILE], padded with 0."""
    num_tiles = -(-len(masses) // TILE)
    tiles = np.zeros(num_tiles * TILE, dtype=np.float32)
    tiles[: len(masses)] = masses
    return tiles.reshape(num_tiles, TILE)


def cumulative_mass(tiles: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns [num_tiles] float64: the mass up to and including each tile. Tiles of 0 change no other entry."""
    return np.cumsum(tiles.astype(np.float64).sum(axis=1))


def pick(tiles: NDArray[np.float32], draw: float) -> tuple[int, int]:
    """Step 7e: returns (tile, offset) of the id whose share of [0, 1) holds `draw`.

    Args:
        tiles: [num_tiles, TILE] float32 masses, 0 for ids that may not be drawn; not all 0.
        draw: uniform in [0, 1).
    """
    cumulative = cumulative_mass(tiles)
    target = draw * float(cumulative[-1])
    tile = min(int(np.count_nonzero(cumulative <= target)), len(tiles) - 1)
    rest = target - (float(cumulative[tile - 1]) if tile else 0.0)
    inside = np.cumsum(tiles[tile], dtype=np.float64)
    # Rounding may leave `rest` at or above the tile's own sum: the tile's last drawable id is meant then.
    drawable = np.flatnonzero(tiles[tile])
    return tile, min(int(np.count_nonzero(inside <= rest)), int(drawable[-1]))


def sample_row(logits: NDArray[np.float32], sampling: RowSampling) -> tuple[int, RowStatus]:
    """Samples one row by the module's order of operations.

    Args:
        logits: [vocab_size] float32.
        sampling: the row's parameters.

    Returns:
        (token id, status); the id means nothing unless the status is OK.
    """
    scores, status = restricted_scores(logits, sampling)
    if status != RowStatus.OK:
        return 0, status
    if sampling.temperature < GREEDY_BELOW:
        return int(np.argmax(scores)), RowStatus.OK
    tile, offset = pick(as_tiles(filtered_masses(scores, sampling)), sampling.draw)
    return tile * TILE + offset, RowStatus.OK


def processed_log_weights(logits: NDArray[np.float32], sampling: RowSampling) -> NDArray[np.float32]:
    """Returns [vocab_size] float32: logarithms of the masses a row is drawn from. Its status must be OK."""
    scores, _ = restricted_scores(logits, sampling)
    if sampling.temperature < GREEDY_BELOW:
        return scores
    drawable = filtered_masses(scores, sampling) > 0
    return np.where(drawable, (scores - scores.max()) / np.float32(sampling.temperature), np.float32(-np.inf))


def restricted_scores(logits: NDArray[np.float32], sampling: RowSampling) -> tuple[NDArray[np.float32], RowStatus]:
    """Steps 1 and 3 to 6: returns [vocab_size] float32 scores, -infinity for ids not allowed, and the status."""
    finite = np.isfinite(logits)
    if np.isnan(logits).any() or np.isposinf(logits).any() or not finite.any():
        return logits, RowStatus.NON_FINITE
    allowed = allowed_ids(len(logits), sampling) & finite
    if not allowed.any():
        return logits, RowStatus.NOTHING_ALLOWED
    scores = logits if sampling.penalties is None else penalised(logits, sampling.penalties)
    return np.where(allowed, scores, -np.inf).astype(np.float32), RowStatus.OK


def filtered_masses(scores: NDArray[np.float32], sampling: RowSampling) -> NDArray[np.float32]:
    """Steps 7a to 7d: returns [vocab_size] float32 masses, 0 for ids that may not be drawn."""
    masses = np.exp((scores - scores.max()) / np.float32(sampling.temperature)).astype(np.float32)
    # A stable sort of the negated scores: largest first, lower id first on a tie.
    order = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < len(scores):
        masses[order[sampling.top_k :]] = 0.0
    if sampling.top_p < 1.0:
        cumulative = np.cumsum(masses[order], dtype=np.float64)
        total = float(cumulative_mass(as_tiles(masses))[-1])
        num_kept = int(np.count_nonzero(cumulative < sampling.top_p * total)) + 1
        masses[order[num_kept:]] = 0.0
    masses[masses < np.float32(sampling.min_p) * masses.max()] = 0.0
    return masses
