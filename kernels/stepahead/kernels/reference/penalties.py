"""Penalties, biases and bad words: what the history of a sequence does to the logits of its next token.

For an id with logit x that occurs in the history (the prompt included) or c times among the outputs:

    repetition  r:   x / r where x > 0, else x * r      once per id, however often it occurs; Keskar et al. 2019
    frequency   f:   x - f * c
    presence    p:   x - p where c > 0
    bias        b:   x + b

in this order. Repetition, frequency and presence are computed together in float64 and rounded to float32 once, then
the bias in the same way; each result is held within +-MAX_SCORE, so that no option makes an infinity.

A bad word is a sequence of ids: its last id is banned where its other ids are the newest outputs. The prompt is not
looked at, and a word of one id is always banned.

This module is the specification: it looks at the whole history every time. `cpu.penalties` keeps count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_SCORE = 1e30
"""Bound of a changed logit: differences of two stay finite in float32 after division by any temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """How a sequence's history, and fixed lists, change what it may sample. Ids are below the vocabulary size."""

    repetition_penalty: float = 1.0  # above 0; 1: off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias_ids: NDArray[np.int64] | None = None  # [num_biases], each id once
    biases: NDArray[np.float32] | None = None  # [num_biases], finite
    bad_words: tuple[tuple[int, ...], ...] = ()  # none of them empty
    allowed_ids: NDArray[np.int64] | None = None  # None: every id


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPenalties:
    """Steps 3 to 5 of `reference.sampling` for one row; columns over some ids, the others keep their logits."""

    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seen_ids: NDArray[np.int64]  # [num_seen], each id once
    output_counts: NDArray[np.int64]  # [num_seen], occurrences among the outputs
    bias_ids: NDArray[np.int64]  # [num_biases], each id once
    biases: NDArray[np.float32]  # [num_biases]


def row_penalties(rules: TokenRules, token_ids: Sequence[int], num_prompt_tokens: int) -> RowPenalties:
    """Returns what a history means for its next token.

    Args:
        rules: of the sequence.
        token_ids: the whole history: prompt, then outputs.
        num_prompt_tokens: how much of it is the prompt.
    """
    outputs = list(token_ids[num_prompt_tokens:])
    seen = sorted(set(token_ids))
    return RowPenalties(
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
        seen_ids=np.array(seen, np.int64),
        output_counts=np.array([outputs.count(token_id) for token_id in seen], np.int64),
        bias_ids=np.zeros(0, np.int64) if rules.bias_ids is None else rules.bias_ids,
        biases=np.zeros(0, np.float32) if rules.biases is None else rules.biases,
    )


def banned_ids(bad_words: Sequence[Sequence[int]], outputs: Sequence[int]) -> set[int]:
    """Returns the ids that would complete a bad word after these outputs."""
    banned: set[int] = set()
    for *prefix, last in bad_words:
        if not prefix or list(outputs[-len(prefix) :]) == prefix:
            banned.add(last)
    return banned


def penalised(logits: NDArray[np.float32], penalties: RowPenalties) -> NDArray[np.float32]:
    """Returns the logits after steps 3 to 5.

    Args:
        logits: [vocab_size] float32 without NaN and +infinity; -infinity stays what it is.
        penalties: of the row.
    """
    seen = np.zeros(len(logits), np.bool_)
    seen[penalties.seen_ids] = True
    counts = np.zeros(len(logits), np.int64)
    counts[penalties.seen_ids] = penalties.output_counts
    values = logits.astype(np.float64)
    repetition = penalties.repetition_penalty
    values = np.where(seen, np.where(values > 0, values / repetition, values * repetition), values)
    values = values - penalties.frequency_penalty * counts - penalties.presence_penalty * (counts > 0)
    scores = np.where(seen, _bounded(values), logits)
    biased = np.zeros(len(logits), np.bool_)
    biased[penalties.bias_ids] = True
    biases = np.zeros(len(logits))
    biases[penalties.bias_ids] = penalties.biases
    scores = np.where(biased, _bounded(scores.astype(np.float64) + biases), scores)
    return np.where(np.isneginf(logits), logits, scores)


def _bounded(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.clip(values, -MAX_SCORE, MAX_SCORE).astype(np.float32)
