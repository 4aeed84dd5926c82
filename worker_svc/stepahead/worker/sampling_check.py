"""Checks how an admission wants to be sampled. Every id is held against the width of the logits it will index."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepahead.kernels.reference.logprobs import MAX_TOP_K
from stepahead.kernels.reference.penalties import TokenRules
from stepahead.worker.runner import NO_LOGPROBS
from stepahead.worker.slot_table import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepahead.v1.worker_pb2 import SlotSampling
    from stepahead.worker.runner import Float32Array, Int64Array
    from stepahead.worker.slot_overlay import Violations


class SamplingChecker:
    """Turns `SlotSampling` messages into checked `SamplingOptions`.

    Args:
        faults: collects what is wrong.
        vocab_size: width of the logits.
    """

    def __init__(self, faults: Violations, vocab_size: int) -> None:
        self._faults = faults
        self._vocab_size = vocab_size

    def check(self, field: str, message: SlotSampling) -> SamplingOptions:
        """The message's options; faults go to the collector, with `field` in front of their names."""
        self._check_numbers(field, message)
        suppressed = self._ids(f"{field}.suppressed_token_ids", message.suppressed_token_ids)
        return SamplingOptions(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=0 if message.top_k >= self._vocab_size else message.top_k,
            min_p=message.min_p,
            seed=message.seed,
            choice_index=message.choice_index,
            suppressed=suppressed,
            min_tokens=message.min_tokens,
            rules=self._rules(field, message),
            logprobs_top_k=self._top_k(
                f"{field}.logprobs_top_k", message.logprobs_top_k if message.HasField("logprobs_top_k") else None
            ),
            processed_logprobs=message.processed_logprobs,
            prompt_logprobs_top_k=self._top_k(
                f"{field}.prompt_logprobs_top_k",
                message.prompt_logprobs_top_k if message.HasField("prompt_logprobs_top_k") else None,
            ),
        )

    def _check_numbers(self, field: str, message: SlotSampling) -> None:
        faults = self._faults
        for name in ("temperature", "repetition_penalty"):
            value = float(getattr(message, name))
            if not (math.isfinite(value) and value >= 0):
                faults.add(f"{field}.{name}", f"{value} is not a finite number of at least 0")
        for name in ("frequency_penalty", "presence_penalty"):
            value = float(getattr(message, name))
            if not math.isfinite(value):
                faults.add(f"{field}.{name}", f"{value} is not a finite number")
        if not 0 < message.top_p <= 1:
            faults.add(f"{field}.top_p", f"{message.top_p} is not in (0, 1]")
        if not 0 <= message.min_p <= 1:
            faults.add(f"{field}.min_p", f"{message.min_p} is not in [0, 1]")

    def _rules(self, field: str, message: SlotSampling) -> TokenRules | None:
        """None: no rule is on."""
        bias_ids, biases = self._biases(field, message)
        rules = TokenRules(
            repetition_penalty=message.repetition_penalty or 1.0,
            frequency_penalty=message.frequency_penalty,
            presence_penalty=message.presence_penalty,
            bias_ids=bias_ids,
            biases=biases,
            bad_words=self._bad_words(field, message),
            allowed_ids=self._ids(f"{field}.allowed_token_ids", message.allowed_token_ids),
        )
        is_on = (
            rules.repetition_penalty != 1.0
            or rules.frequency_penalty != 0.0
            or rules.presence_penalty != 0.0
            or bool(rules.bad_words)
            or not (rules.bias_ids is rules.allowed_ids is None)
        )
        return rules if is_on else None

    def _biases(self, field: str, message: SlotSampling) -> tuple[Int64Array | None, Float32Array | None]:
        bias_ids = self._ids(f"{field}.bias_token_ids", message.bias_token_ids)
        biases = np.array(list(message.biases), np.float32)
        num_ids = len(message.bias_token_ids)
        if len(biases) != num_ids:
            self._faults.add(f"{field}.biases", f"has {len(biases)} entries, bias_token_ids asks for {num_ids}")
        if len(set(message.bias_token_ids)) != num_ids:
            self._faults.add(f"{field}.bias_token_ids", "names an id twice")
        for index in np.flatnonzero(~np.isfinite(biases)).tolist():
            self._faults.add(f"{field}.biases[{index}]", f"{biases[index]} is not a finite number")
        return bias_ids, None if bias_ids is None else biases

    def _bad_words(self, field: str, message: SlotSampling) -> tuple[tuple[int, ...], ...]:
        lengths, token_ids = list(message.bad_word_lengths), list(message.bad_word_token_ids)
        self._ids(f"{field}.bad_word_token_ids", token_ids)
        if 0 in lengths:
            self._faults.add(f"{field}.bad_word_lengths[{lengths.index(0)}]", "must be at least 1")
            return ()
        if sum(lengths) != len(token_ids):
            self._faults.add(
                f"{field}.bad_word_token_ids",
                f"has {len(token_ids)} entries, sum of bad_word_lengths asks for {sum(lengths)}",
            )
            return ()
        ids = iter(token_ids)
        return tuple(tuple(next(ids) for _ in range(length)) for length in lengths)

    def _top_k(self, field: str, top_k: int | None) -> int:
        if top_k is None:
            return NO_LOGPROBS
        if top_k > MAX_TOP_K:
            self._faults.add(field, f"{top_k} is not in 0 .. {MAX_TOP_K}")
        return top_k

    def _ids(self, field: str, values: Sequence[int]) -> Int64Array | None:
        """The ids as an array; None: there are none."""
        if not values:
            return None
        token_ids = np.array(list(values), np.int64)
        if int(token_ids.max()) >= self._vocab_size:
            index = int(token_ids.argmax())
            self._faults.add(f"{field}[{index}]", f"{token_ids[index]} is not in 0 .. {self._vocab_size - 1}")
        return token_ids
