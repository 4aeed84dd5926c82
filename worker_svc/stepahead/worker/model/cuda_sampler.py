"""Samples a step's rows on the device: penalties, masks, draws, log probabilities.

What a history means for the next token is split by who knows it: how often each id occurred is counted on the
device, which samples; what bad words have begun is read from the host's `TokenRuleState`, which is up to date
because the results of a step are taken before the next one is sampled (`LaunchingRunner`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cpu.penalties import TokenRuleState
from stepahead.kernels.cuda import sampling as kernels
from stepahead.kernels.cuda.backend import Backend
from stepahead.kernels.cuda.inputs import Cells
from stepahead.kernels.cuda.step_arrays import PackedArrays
from stepahead.kernels.reference.penalties import RowPenalties
from stepahead.worker.model.cuda_engine import FedStep
from stepahead.worker.model.cuda_results import Described, SampledStep
from stepahead.worker.model.sampling_arrays import (
    NO_SLOT,
    Arrays,
    asked_arrays,
    penalty_arrays,
    plain_arrays,
    restriction_arrays,
)
from stepahead.worker.runner import StepBatch

_WORD_BITS = 32

Tensors = Mapping[str, torch.Tensor]


class DeviceSampler:
    """Samples on one device; one thread calls it.

    Args:
        backend: the device.
        num_slots: slots of the worker.
        vocab_size: width of the logits.
    """

    def __init__(self, backend: Backend, num_slots: int, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._counts = kernels.TokenCounts(
            outputs=backend.allocate((num_slots, vocab_size), torch.int32),
            prompts=backend.allocate((num_slots, -(-vocab_size // _WORD_BITS)), torch.int32),
        )
        self._counted: list[TokenRuleState | None] = [None] * num_slots  # whose history a slot's counts are of

    def sample(self, batch: StepBatch, fed: FedStep, cells: Cells) -> SampledStep:
        """Launches the sampling of `batch.sample_rows`, which are some of the rows `fed` has logits of."""
        backend = self._backend
        arrays = self._arrays(batch, fed)
        there = PackedArrays(arrays).upload(backend)
        logits = fed.logits.index_select(0, there["choices"]) if "choices" in there else fed.logits
        untouched = logits.index_select(0, there["raw"]) if "raw" in there else None
        row_status = fed.row_status.index_select(0, there["rows"])
        self._apply_rules(logits, there, row_status)
        columns = _columns(there)
        places = (row_status, there["slots"], there["positions"])
        tokens, status = kernels.sample(backend, logits, places, columns, cells)
        if "counted_slots" in there:
            kernels.count_tokens(backend, self._counts, there["counted_slots"], tokens, status)
        described: list[Described] = []
        if untouched is not None:
            described.append(self._describe(untouched, (tokens, status), there, arrays, "raw"))
        if "processed" in there:
            kernels.keep_drawable(backend, logits, status, there["selected"], columns)
            drawn_from = logits.index_select(0, there["processed"])
            described.append(self._describe(drawn_from, (tokens, status), there, arrays, "processed"))
        return SampledStep(backend.download(tokens), backend.download(status), tuple(described))

    def describe_prompt(
        self, logits: torch.Tensor, token_ids: NDArray[np.int64], top_k: NDArray[np.int32]
    ) -> Described:
        """Launches RAW log probabilities of given tokens, one per row of logits."""
        there = PackedArrays({"token_ids": token_ids, "top_k": top_k}).upload(self._backend)
        status = self._backend.allocate((len(token_ids),), torch.uint8)
        status.zero_()
        found = kernels.logprobs(self._backend, logits, there["token_ids"], status, there["top_k"])
        return Described.downloaded(self._backend, np.arange(len(token_ids)), found)

    def _arrays(self, batch: StepBatch, fed: FedStep) -> Arrays:
        """Everything the device must know, on the host."""
        sampling = batch.sampling
        rows, slots = batch.sample_rows.astype(np.int64), batch.slots[batch.sample_rows]
        arrays: Arrays = {
            "rows": rows,
            "slots": slots,
            "positions": batch.seq_lens[batch.sample_rows].astype(np.int64) - 1,
            **plain_arrays(sampling),
            **restriction_arrays(sampling, self._vocab_size),
            **asked_arrays(sampling),
        }
        if len(rows) != len(fed.choice_rows):
            arrays["choices"] = np.searchsorted(fed.choice_rows, rows)
        if sampling.rule_states:
            penalties = [None if state is None else state.penalties() for state in sampling.rule_states]
            arrays |= penalty_arrays(penalties, slots)
            if "counted_slots" in arrays:
                self._count_histories(arrays["counted_slots"].tolist(), sampling.rule_states, penalties)
        return arrays

    def _count_histories(
        self,
        slots: list[int],
        states: tuple[TokenRuleState | None, ...],
        penalties: list[RowPenalties | None],
    ) -> None:
        """Counts the histories of sequences that have just come into their slots."""
        for slot, state, row in zip(slots, states, penalties, strict=True):
            if slot == NO_SLOT or row is None or self._counted[slot] is state:
                continue
            self._counted[slot] = state
            ids, counts = row.seen_ids, row.output_counts
            history = np.concatenate([ids[counts == 0], np.repeat(ids, counts)])
            num_prompt = int(np.count_nonzero(counts == 0))
            kernels.count_history(self._backend, self._counts, slot, self._backend.upload(history), num_prompt)

    def _apply_rules(self, logits: torch.Tensor, there: Tensors, row_status: torch.Tensor) -> None:
        """Penalties, biases, then masks, in place."""
        backend = self._backend
        if "counted_slots" in there:
            columns = kernels.PenaltyColumns(
                repetition=there["repetition"], frequency=there["frequency"], presence=there["presence"]
            )
            kernels.apply_penalties(backend, logits, there["counted_slots"], self._counts, columns)
        if "biases" in there:
            kernels.add_bias(backend, logits, (there["bias_rows"], there["bias_ids"], there["biases"]))
        if "mask_index" in there:
            masks = kernels.Masks(
                words=there["mask_words"],
                index=there["mask_index"],
                suppressed_ids=there["suppressed_ids"],
                suppressed_start=there["suppressed_start"],
            )
            kernels.mask_logits(backend, logits, masks, row_status)

    def _describe(
        self,
        log_weights: torch.Tensor,
        sampled: tuple[torch.Tensor, torch.Tensor],
        there: Tensors,
        arrays: Arrays,
        kind: str,
    ) -> Described:
        """Launches log probabilities of the samples that asked for this kind."""
        tokens, status = (column.index_select(0, there[kind]) for column in sampled)
        found = kernels.logprobs(self._backend, log_weights, tokens, status, there[f"{kind}_top_k"])
        return Described.downloaded(self._backend, arrays[kind].astype(np.int64), found)


def _columns(there: Tensors) -> kernels.SamplingColumns:
    return kernels.SamplingColumns(
        temperature=there["temperature"],
        top_p=there["top_p"],
        top_k=there["top_k"],
        min_p=there["min_p"],
        seed=there["seed"],
        choice_index=there["choice_index"],
        output_index=there["output_index"],
    )
