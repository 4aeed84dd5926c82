"""RMS norm and the gated activation of a decoder layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Returns x / sqrt(mean(x^2) + eps) * weight, over the last axis (Zhang and Sennrich, 2019).

    Args:
        x: [..., size] float32.
        weight: [size] float32.
        eps: added to the mean square.
    """
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(np.float32)


def silu_mul(gate_up: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns silu(gate) * up, silu(z) = z / (1 + exp(-z)) (SwiGLU: Shazeer, 2020).

    Args:
        gate_up: [num_tokens, 2 * intermediate_size] float32, the gate first.

    Returns:
        [num_tokens, intermediate_size] float32.
    """
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return (gate / (1.0 + np.exp(-gate)) * up).astype(np.float32)
