"""The arithmetic of the benchmarks: percentiles, spread, ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Figures = TypeVar("_Figures", bound="DataclassInstance")


def percentile(values: Sequence[float], share: float) -> float:
    """The value at or below which `share` (0 to 1) of the values lie (nearest rank); 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repetitions."""

    median: float
    low: float
    high: float
    count: int


def spread_of(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, pair by pair: runs of one pair were neighbours in time and saw the same machine.

    Args:
        ours: one figure per repetition, in order.
        theirs: as many, above 0.
    """
    return spread_of([our / their for our, their in zip(ours, theirs, strict=True)])


def median_of(runs: Sequence[_Figures]) -> _Figures:
    """Field-wise medians of the numbers of runs of one cell; what is no number is the first run's."""
    first = asdict(runs[0])
    numbers = {name for name, value in first.items() if isinstance(value, int | float)}
    return replace(runs[0], **{name: statistics.median(getattr(run, name) for run in runs) for name in numbers})
