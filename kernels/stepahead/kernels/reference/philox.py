"""Philox-4x32-10, the counter-based generator behind every random draw.

A counter-based generator has no state: its output is a function of (key, counter). A draw that is a pure
function of (seed, choice index, output index) cannot be changed by batch neighbours, retries or a replay.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the known-answer
vectors of its reference implementation, Random123, are in the tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)


def philox_4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Returns the generator's four words for each counter.

    Args:
        counter: [num_draws, 4] uint32.
        key: [num_draws, 2] uint32.

    Returns:
        [num_draws, 4] uint32.
    """
    word_0, word_1, word_2, word_3 = (counter[:, i].astype(np.uint64) for i in range(4))
    key_0, key_1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(ROUNDS):
        # A 32 x 32 bit product fits 64 bits, so nothing here wraps by accident.
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0 = (product_1 >> _SHIFT_32) ^ word_1 ^ key_0
        word_2 = (product_0 >> _SHIFT_32) ^ word_3 ^ key_1
        word_1 = product_1 & _LOW_32
        word_3 = product_0 & _LOW_32
        key_0 = (key_0 + _WEYL_0) & _LOW_32
        key_1 = (key_1 + _WEYL_1) & _LOW_32
    return np.stack([word_0, word_1, word_2, word_3], axis=1).astype(np.uint32)


def draw_words(
    seed: NDArray[np.uint64], choice_index: NDArray[np.int64], output_index: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """Returns the four random words that belong to an output token.

    Key = (seed low, seed high); counter = (output low, output high, choice low, choice high), 32 bits each.

    Args:
        seed: [num_draws] uint64.
        choice_index: [num_draws] int64, 0 and up.
        output_index: [num_draws] int64, 0 for the first output token of the choice.

    Returns:
        [num_draws, 4] uint32.
    """
    output, choice = output_index.astype(np.uint64), choice_index.astype(np.uint64)
    halves = [output & _LOW_32, output >> _SHIFT_32, choice & _LOW_32, choice >> _SHIFT_32]
    counter = np.stack(halves, axis=1).astype(np.uint32)
    key = np.stack([seed & _LOW_32, seed >> _SHIFT_32], axis=1).astype(np.uint32)
    return philox_4x32(counter, key)


def draw_uniform(
    seed: NDArray[np.uint64], choice_index: NDArray[np.int64], output_index: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns the one uniform number in [0, 1) that decides an output token; arguments as `draw_words`.

    The 53 bits are word 0's upper 27 and word 1's upper 26, the usual way to fill a double's fraction.

    Returns:
        [num_draws] float64.
    """
    words = draw_words(seed, choice_index, output_index)
    upper, lower = words[:, 0] >> np.uint32(5), words[:, 1] >> np.uint32(6)
    return (upper.astype(np.float64) * 67108864.0 + lower.astype(np.float64)) / 9007199254740992.0
