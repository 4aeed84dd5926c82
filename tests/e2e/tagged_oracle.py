"""What `toy:tagged` must answer, computed from the prompt alone: no cache, no batch, no steps.

The formulas are those of stepahead.worker.toy.hashed, written down again in plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepahead.kernels.reference.philox import draw_words
from stepahead.v1 import generation_pb2

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
VOCAB_SIZE = 257


def mix64(value: int) -> int:
    """SplitMix64's finaliser."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def place_hash(position: int, token_id: int) -> int:
    """What the kv_slot of one position adds to the hash of a context."""
    tag = mix64((mix64((position + GOLDEN) & MASK) + token_id) & MASK) >> 1
    return mix64(tag ^ (position * GOLDEN & MASK))


def continuation(prompt: Sequence[int], num_tokens: int, *, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """The tokens after a prompt."""
    total = sum(place_hash(position, token_id) for position, token_id in enumerate(prompt)) & MASK
    token_ids: list[int] = []
    for index in range(num_tokens):
        state = mix64(total)
        if temperature:
            columns: list[Any] = [np.array([seed], np.uint64), np.array([0]), np.array([index])]
            first, second = (int(word) for word in draw_words(*columns)[0][:2])
            state = mix64(state ^ ((first << 32) | second))
        token_ids.append(state % VOCAB_SIZE)
        total = (total + place_hash(len(prompt) + index, token_ids[-1])) & MASK
    return token_ids


def expected(message: generation_pb2.GenerateRequest) -> list[int]:
    """The tokens of a request of token ids that ends at its limit."""
    return continuation(
        message.token_ids.ids,
        message.stopping.max_tokens,
        temperature=message.sampling.temperature,
        seed=message.sampling.seed,
    )
