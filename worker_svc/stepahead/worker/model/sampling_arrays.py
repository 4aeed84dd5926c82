"""What a step's sampling options mean, as flat arrays for the device. Host only; rows are sampling rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.cpu.penalties import TokenRuleState
from stepahead.kernels.reference.penalties import RowPenalties
from stepahead.worker.runner import NO_LOGPROBS, SamplingColumns

Arrays = dict[str, NDArray[np.generic]]

NO_SLOT = -1
"""In `counted_slots`: the row has no penalties."""

_NO_MASK = -1
_NEUTRAL = (1.0, 0.0, 0.0)
_WORD_BYTES = 4
_NO_IDS = np.zeros(0, np.int64)


def plain_arrays(sampling: SamplingColumns) -> Arrays:
    """Returns what every row has."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed.view(np.int64),
        "choice_index": sampling.choice_index,
        "output_index": sampling.output_index,
    }


def penalty_arrays(penalties: Sequence[RowPenalties | None], slots: NDArray[np.int32]) -> Arrays:
    """Returns counted_slots, repetition, frequency, presence; bias_rows, bias_ids, biases: where a row has any.

    Args:
        penalties: [num_rows].
        slots: [num_rows].
    """
    arrays: Arrays = {}
    values = np.array([_NEUTRAL if one is None else penalty_values(one) for one in penalties], np.float32)
    counted = (values != np.array(_NEUTRAL, np.float32)).any(axis=1)
    if counted.any():
        arrays["counted_slots"] = np.where(counted, slots, NO_SLOT).astype(np.int32)
        for place, name in enumerate(("repetition", "frequency", "presence")):
            arrays[name] = values[:, place]
    biased = [(row, one) for row, one in enumerate(penalties) if one is not None and len(one.bias_ids)]
    if biased:
        rows = [np.full(len(one.bias_ids), row, np.int32) for row, one in biased]
        arrays["bias_rows"] = np.concatenate(rows)
        arrays["bias_ids"] = np.concatenate([one.bias_ids for _, one in biased]).astype(np.int32)
        arrays["biases"] = np.concatenate([one.biases for _, one in biased])
    return arrays


def penalty_values(penalties: RowPenalties) -> tuple[float, float, float]:
    """Returns repetition, frequency and presence penalty."""
    return penalties.repetition_penalty, penalties.frequency_penalty, penalties.presence_penalty


def restriction_arrays(sampling: SamplingColumns, vocab_size: int) -> Arrays:
    """Returns mask_words, mask_index, suppressed_ids, suppressed_start (see `kernels.cuda.sampling.Masks`).

    A mask and an allowed list become one mask; suppressed ids and the ends of bad words one list. Nothing where no
    row has any.
    """
    if not (sampling.masks or sampling.suppressed or sampling.rule_states):
        return {}
    count = len(sampling)
    states = sampling.rule_states or (None,) * count
    masks = [
        _mask(state, mask, vocab_size)
        for state, mask in zip(states, sampling.masks or (None,) * count, strict=True)
    ]
    lists = [
        _forbidden(state, ids) for state, ids in zip(states, sampling.suppressed or (None,) * count, strict=True)
    ]
    num_words = -(-vocab_size // (8 * _WORD_BYTES))
    given = [mask for mask in masks if mask is not None]
    lengths = [len(ids) for ids in lists]
    if not given and not any(lengths):
        return {}
    words = np.zeros((len(given), num_words * _WORD_BYTES), np.uint8)
    for place, mask in enumerate(given):
        words[place, : len(mask)] = mask
    has_mask = np.array([mask is not None for mask in masks])
    return {
        "mask_words": words.view(np.int32),
        "mask_index": np.where(has_mask, np.cumsum(has_mask) - 1, _NO_MASK).astype(np.int32),
        "suppressed_ids": np.concatenate(lists).astype(np.int32),
        "suppressed_start": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
    }


def asked_arrays(sampling: SamplingColumns) -> Arrays:
    """Returns who asks for log probabilities.

    raw and processed: indexes of rows that ask for this kind; raw_top_k and processed_top_k: for how many best ids;
    selected: 1 for rows of the second kind. Each where a row asks.
    """
    asked = sampling.logprobs
    if asked is None:
        return {}
    arrays: Arrays = {}
    wanted = asked.top_k != NO_LOGPROBS
    for name, chosen in (("raw", wanted & ~asked.processed), ("processed", wanted & asked.processed)):
        if chosen.any():
            arrays[name] = np.flatnonzero(chosen)
            arrays[f"{name}_top_k"] = asked.top_k[chosen]
    if "processed" in arrays:
        arrays["selected"] = (wanted & asked.processed).astype(np.uint8)
    return arrays


def _mask(
    state: TokenRuleState | None, mask: NDArray[np.uint8] | None, vocab_size: int
) -> NDArray[np.uint8] | None:
    allowed = None if state is None else state.allowed_ids
    if allowed is None:
        return mask
    bits = np.zeros(vocab_size, np.bool_)
    bits[allowed] = True
    listed = np.packbits(bits, bitorder="little")
    return listed if mask is None else listed & mask


def _forbidden(state: TokenRuleState | None, suppressed: NDArray[np.int64] | None) -> NDArray[np.int64]:
    banned = None if state is None else state.banned_ids()
    parts = [ids for ids in (suppressed, banned) if ids is not None]
    return np.concatenate(parts) if parts else _NO_IDS
