"""RMS norm, the gated activations of a decoder layer, and the soft cap of scores and logits."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Float = TypeVar("_Float", np.float32, np.float64)


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


def gelu_tanh_mul(gate_up: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns gelu(gate) * up, gelu(z) = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))).

    The tanh form (Hendrycks and Gimpel, 2016), gated (GeGLU: Shazeer, 2020); z * sigmoid(2 * argument of tanh).

    Args:
        gate_up: [num_tokens, 2 * intermediate_size] float32, the gate first.

    Returns:
        [num_tokens, intermediate_size] float32.
    """
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    inner = np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1.0 + np.tanh(inner)) * up).astype(np.float32)


def softcap(x: NDArray[_Float], cap: float) -> NDArray[_Float]:
    """Returns cap * tanh(x / cap): x where it is small, never beyond +-cap (Gemma 2, 2024). Any shape and dtype."""
    return (cap * np.tanh(x / cap)).astype(x.dtype)
