"""Percentiles of samples."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of the samples do not exceed (nearest rank). NaN of none."""
    if not samples:
        return float("nan")
    ordered = sorted(samples)
    rank = -(-len(ordered) * share // 1)
    return ordered[max(0, int(rank) - 1)]
