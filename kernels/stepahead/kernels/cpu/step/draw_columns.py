"""What `DecoderStep.draw` draws by, and what it checks before that reaches compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DRAW_DTYPES = {
    "rows": np.int64,
    "largest": np.float32,
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int32,
    "min_p": np.float32,
    "uniform": np.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawColumns:
    """Parameters of `DecoderStep.draw`, an entry per draw: those of `reference.sampling.RowSampling`."""

    rows: NDArray[np.int64]
    largest: NDArray[np.float32]
    """Each row's largest logit, finite."""
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name: contiguous, of the library's dtypes."""
        return {name: np.ascontiguousarray(getattr(self, name), dtype) for name, dtype in _DRAW_DTYPES.items()}


def checked_columns(logits: NDArray[np.float32], draws: DrawColumns, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Returns the columns by their names in abi.h.

    Raises:
        ValueError: the logits have another shape, a column another length, a row does not exist or has no finite
            largest logit, or a temperature is not positive.
    """
    columns = draws.arrays()
    num_draws = len(columns["rows"])
    if logits.ndim != 2 or logits.shape[1] != vocab_size or logits.dtype != np.float32:
        raise ValueError(f"logits must be float32 [any, {vocab_size}]")
    if not logits.flags.c_contiguous or any(column.shape != (num_draws,) for column in columns.values()):
        raise ValueError("logits must be contiguous, and the columns of draws equally long")
    rows = columns["rows"]
    if num_draws and not 0 <= rows.min() <= rows.max() < len(logits):
        raise ValueError(f"rows must be in 0..{len(logits) - 1}, not {rows.min()}..{rows.max()}")
    if not np.isfinite(columns["largest"]).all():
        raise ValueError("rows without a finite largest logit cannot be drawn from")
    if not (columns["temperature"] > 0).all():
        raise ValueError("temperatures must be positive")
    return columns
