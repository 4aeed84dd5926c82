"""Rotary position embedding and the ways its frequencies are stretched.

Half-split pairing (Hugging Face order): element i of a head turns with element i + head_dim / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Interpolation by number of rotations, and a factor on the tables (YaRN, Peng et al. 2023)."""

    factor: float
    original_context_tokens: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisorScaling:
    """Each frequency divided by its own number, as GGUF's `rope_freqs.weight` gives them."""

    divisors: tuple[float, ...]  # [head_dim / 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Each frequency divided by its own number: another set beyond the trained context (LongRoPE, Ding 2024).

    Which set is meant must not depend on how long a sequence happens to be: keys rotated by one set would meet
    queries rotated by the other. So the tables' size decides: tables for more than `original_context_tokens`
    positions take `long`.
    """

    short: tuple[float, ...]  # [rotary_dim / 2]
    long: tuple[float, ...]  # [rotary_dim / 2]
    original_context_tokens: int
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DivisorScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Everything the tables depend on. `scaling` None: as trained."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """Elements of a head that turn, None: all. The others pair up behind them, at frequency 0, so that pairs stay
    half a head apart: elements 0 .. rotary_dim / 2 turn with those from head_dim / 2 on."""

    @property
    def num_rotated(self) -> int:
        """Elements of a head that turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


def inverse_frequencies(rope: RopeConfig, num_positions: int) -> tuple[NDArray[np.float32], float]:
    """Returns ([num_rotated / 2] float32 radians per position, factor on both tables), for so many positions."""
    exponents = np.arange(0, rope.num_rotated, 2, dtype=np.float32) / np.float32(rope.num_rotated)
    plain = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return (plain / np.float32(factor)).astype(np.float32), 1.0
        case DivisorScaling(divisors=divisors):
            return (plain / np.asarray(divisors, dtype=np.float32)).astype(np.float32), 1.0
        case Llama3Scaling():
            return _llama3(plain, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(plain, rope, rope.scaling)
        case LongRopeScaling() as scaling:
            chosen = scaling.long if num_positions > scaling.original_context_tokens else scaling.short
            return (plain / np.asarray(chosen, dtype=np.float32)).astype(np.float32), scaling.attention_factor


def _llama3(plain: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
    wavelength = 2 * math.pi / plain
    smooth = (scaling.original_context_tokens / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    # Clipping gives 0 for waves longer than the low bound and 1 for those shorter than the high one.
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1.0 - smooth) * plain / scaling.factor + smooth * plain).astype(np.float32)


def _yarn(plain: NDArray[np.float32], rope: RopeConfig, scaling: YarnScaling) -> tuple[NDArray[np.float32], float]:
    def dimension_of(num_rotations: float) -> float:
        turns = scaling.original_context_tokens / (num_rotations * 2 * math.pi)
        return rope.num_rotated * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.num_rotated - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = np.clip((np.arange(rope.num_rotated // 2) - low) / (high - low), 0.0, 1.0)
    frequencies = plain / scaling.factor * ramp + plain * (1.0 - ramp)
    factor = scaling.attention_factor
    if factor is None:
        factor = 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
    return frequencies.astype(np.float32), factor


def rope_tables(rope: RopeConfig, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns (cos, sin), each [num_positions, head_dim / 2] float32."""
    frequencies, factor = inverse_frequencies(rope, num_positions)
    # float32 products as the reference implementations have them: the rounding is part of the trained model.
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
    cos = np.ones((num_positions, rope.head_dim // 2), np.float32)
    sin = np.zeros_like(cos)
    cos[:, : len(frequencies)] = np.cos(angles) * np.float32(factor)
    sin[:, : len(frequencies)] = np.sin(angles) * np.float32(factor)
    return cos, sin


def rotary_order(rope: RopeConfig) -> NDArray[np.int64]:
    """Returns [head_dim]: where each element of a head lies in a checkpoint that keeps the turning ones in front.

    Those pair up half of `num_rotated` apart; here all pairs are half a head apart. The same order for queries and
    keys leaves every score as it is.
    """
    half, turning = rope.head_dim // 2, rope.num_rotated // 2
    first, second = np.arange(turning), np.arange(turning, 2 * turning)
    still = np.arange(2 * turning, rope.head_dim)
    return np.concatenate([first, still[: half - turning], second, still[half - turning :]])


def apply_rope(
    heads: NDArray[np.float32],
    positions: NDArray[np.int64],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Turns each head by its position.

    Args:
        heads: [num_tokens, num_heads, head_dim] float32.
        positions: [num_tokens] int64.
        cos: [num_positions, head_dim / 2], from `rope_tables`.
        sin: as `cos`.

    Returns:
        [num_tokens, num_heads, head_dim] float32.
    """
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    turn_cos, turn_sin = cos[positions][:, None], sin[positions][:, None]
    turned = np.empty_like(heads)
    turned[..., :half] = first * turn_cos - second * turn_sin
    turned[..., half:] = second * turn_cos + first * turn_sin
    return turned
