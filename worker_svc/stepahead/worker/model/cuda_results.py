"""Results of a launched step on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cuda.backend import Backend
from stepahead.kernels.cuda.sampling import Logprobs
from stepahead.kernels.reference.logprobs import LogprobEntries
from stepahead.worker.runner import RowLogprobs, SampleStatus, StepBatch, StepSamples


@dataclass(frozen=True, slots=True)
class Described:
    """Log probabilities in host memory; nothing may be read before the device has filled it."""

    places: NDArray[np.int64]  # [num_entries], what each entry is of: a sampling row, or a prompt token
    logprobs: Logprobs  # host tensors

    @classmethod
    def downloaded(cls, backend: Backend, places: NDArray[np.int64], there: Logprobs) -> Self:
        """Launches the copies to the host."""
        return cls(
            places,
            Logprobs(
                token_logprobs=backend.download(there.token_logprobs),
                ranks=backend.download(there.ranks),
                num_listed=backend.download(there.num_listed),
                listed_ids=backend.download(there.listed_ids),
                listed_logprobs=backend.download(there.listed_logprobs),
            ),
        )


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What was sampled, in host memory; nothing may be read before the device has filled it."""

    tokens: torch.Tensor  # [num_samples] int64
    status: torch.Tensor  # [num_samples] uint8
    described: tuple[Described, ...]


def read_samples(batch: StepBatch, sampled: SampledStep, prompt: Sequence[Described]) -> StepSamples:
    """Returns a step's samples; tells the rows' rules. Everything must have arrived.

    Args:
        batch: of the step.
        sampled: of its sampling rows.
        prompt: log probabilities of its prompt targets, places counted through all of them.
    """
    tokens, status = _numpy(sampled.tokens), _numpy(sampled.status)
    for row, state in enumerate(batch.sampling.rule_states):
        if state is not None and status[row] == SampleStatus.OK:
            state.append(int(tokens[row]))
    return StepSamples(
        tokens,
        status,
        output_logprobs=_of_outputs(batch, sampled, status),
        prompt_logprobs=_of_prompt(batch, prompt),
    )


def _of_outputs(batch: StepBatch, sampled: SampledStep, status: NDArray[np.uint8]) -> RowLogprobs | None:
    samples, entries = _joined(sampled.described)
    known = np.flatnonzero(status[samples] == SampleStatus.OK)
    chosen = known[np.argsort(samples[known], kind="stable")]
    if not len(chosen):
        return None
    rows = batch.sample_rows[samples[chosen]].astype(np.int64)
    return RowLogprobs(
        rows=rows,
        first_positions=batch.seq_lens[rows].astype(np.int64),
        entry_counts=np.ones(len(rows), np.int64),
        entries=_entries(entries, chosen),
    )


def _of_prompt(batch: StepBatch, prompt: Sequence[Described]) -> RowLogprobs | None:
    if not prompt:
        return None
    _, entries = _joined(prompt)
    rows = np.array([target.row for target in batch.prompt_targets], np.int64)
    counts = np.array([len(target.token_ids) for target in batch.prompt_targets], np.int64)
    return RowLogprobs(
        rows=rows,
        first_positions=batch.positions[batch.query_start_loc[rows]] + 1,
        entry_counts=counts,
        entries=_entries(entries, np.arange(int(counts.sum()))),
    )


def _joined(parts: Sequence[Described]) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
    """Places and columns of all parts, one behind the other."""
    places = np.concatenate([np.zeros(0, np.int64), *(part.places for part in parts)])
    names = ("token_logprobs", "ranks", "num_listed", "listed_ids", "listed_logprobs")
    columns = [[_numpy(getattr(part.logprobs, name)) for part in parts] for name in names]
    return places, [np.concatenate(column) for column in columns] if parts else []


def _entries(columns: list[NDArray[Any]], chosen: NDArray[np.int64]) -> LogprobEntries:
    values, ranks, counts, ids, listed = (column[chosen] for column in columns)
    most: int = ids.shape[1]
    is_listed = np.arange(most, dtype=np.int64) < counts[:, None]
    return LogprobEntries(
        values=values.astype(np.float32),
        ranks=ranks.astype(np.int64),
        top_counts=counts.astype(np.int64),
        top_ids=ids[is_listed].astype(np.int64),
        top_values=listed[is_listed].astype(np.float32),
    )


def _numpy(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.numpy()
