"""From logits to tokens on the device: penalties, masks, sampling, log probabilities.

Order: raw log probabilities read the untouched logits, so they come first or read a copy; then repetition,
frequency and presence penalty, logit bias, masks, and last `sample`, which does what `reference.sampling` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stepahead.kernels.cuda.backend import Backend, Launch
from stepahead.kernels.cuda.checks import check_tensor
from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.inputs import Cells
from stepahead.kernels.cuda.sources import Module
from stepahead.kernels.reference.logprobs import MAX_TOP_K
from stepahead.kernels.reference.sampling import TILE

MAX_LISTED = MAX_TOP_K
"""Log probabilities a row may list; `logprobs.cu` has the same number."""

_WORD_BITS = 32
_THREADS = 256
_ROW_THREADS = 512
_MAX_VOCAB = 2**20
"""Ids a row of logits may have: the sums of `sample` then fit shared memory, and its integer masses 64 bits."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What penalties are made from, per slot, on the device."""

    outputs: torch.Tensor  # [num_slots, vocab_size] int32, times each id was sampled
    prompts: torch.Tensor  # [num_slots, ceil(vocab_size / 32)] int32 words, bit i % 32 of word i // 32: id i occurs


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyColumns:
    """One value per row."""

    repetition: torch.Tensor  # [num_rows] float32, 1 is neutral
    frequency: torch.Tensor  # [num_rows] float32, 0 is neutral
    presence: torch.Tensor  # [num_rows] float32, 0 is neutral


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """One value per row; see `reference.sampling.RowSampling` and `reference.philox`."""

    temperature: torch.Tensor  # [num_rows] float32
    top_p: torch.Tensor  # [num_rows] float32
    top_k: torch.Tensor  # [num_rows] int32
    min_p: torch.Tensor  # [num_rows] float32
    seed: torch.Tensor  # [num_rows] int64, the bits of the unsigned seed
    choice_index: torch.Tensor  # [num_rows] int64
    output_index: torch.Tensor  # [num_rows] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Which ids each row may sample."""

    words: torch.Tensor  # [num_masks, ceil(vocab_size / 32)] int32, bit i % 32 of word i // 32 allows id i
    index: torch.Tensor  # [num_rows] int32, -1 is none
    suppressed_ids: torch.Tensor  # [num_suppressed] int32
    suppressed_start: torch.Tensor  # [num_rows + 1] int32, offsets into suppressed_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of each row; undefined where the row's status is not OK."""

    token_logprobs: torch.Tensor  # [num_rows] float32
    ranks: torch.Tensor  # [num_rows] int32, 1 + ids with a strictly larger logit
    num_listed: torch.Tensor  # [num_rows] int32, fewer than wanted where fewer ids are possible
    listed_ids: torch.Tensor  # [num_rows, MAX_LISTED] int32, (logit descending, id ascending)
    listed_logprobs: torch.Tensor  # [num_rows, MAX_LISTED] float32


def apply_penalties(
    backend: Backend, logits: torch.Tensor, slots: torch.Tensor, counts: TokenCounts, penalties: PenaltyColumns
) -> None:
    """Repetition, frequency and presence penalty, in place; see `reference.penalties`.

    Args:
        backend: where the tensors are.
        logits: [num_rows, vocab_size] float32.
        slots: [num_rows] int32, -1 for a row that is left alone.
        counts: see `TokenCounts`.
        penalties: see `PenaltyColumns`.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    num_rows, vocab_size = _check_logits(logits)
    check_tensor(slots, "slots", torch.int32, (num_rows,))
    words = -(-vocab_size // _WORD_BITS)
    check_tensor(counts.outputs, "counts.outputs", torch.int32, (None, vocab_size))
    check_tensor(counts.prompts, "counts.prompts", torch.int32, (len(counts.outputs), words))
    columns = (penalties.repetition, penalties.frequency, penalties.presence)
    for column, name in zip(columns, ("repetition", "frequency", "presence"), strict=True):
        check_tensor(column, name, torch.float32, (num_rows,))
    arguments = (logits, slots, counts.outputs, counts.prompts, *columns, np.int32(vocab_size), np.int32(words))
    grid = (-(-vocab_size // _THREADS), num_rows, 1)
    _launch(backend, "penalties", "apply_penalties", grid, _THREADS, arguments)


def add_bias(
    backend: Backend, logits: torch.Tensor, entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Adds logit biases in place; see `reference.penalties`.

    Args:
        backend: where the tensors are.
        logits: [num_rows, vocab_size] float32.
        entries: rows int32, ids int32, values float32, each [num_entries]; a (row, id) at most once.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    _, vocab_size = _check_logits(logits)
    num_entries = len(entries[0])
    for tensor, name, dtype in zip(
        entries, ("rows", "ids", "values"), (torch.int32, torch.int32, torch.float32), strict=True
    ):
        check_tensor(tensor, name, dtype, (num_entries,))
    arguments = (logits, *entries, np.int32(vocab_size), np.int32(num_entries))
    _launch(backend, "penalties", "add_bias", (-(-num_entries // _THREADS), 1, 1), _THREADS, arguments)


def count_tokens(
    backend: Backend, counts: TokenCounts, slots: torch.Tensor, token_ids: torch.Tensor, status: torch.Tensor
) -> None:
    """Adds the tokens of a step's OK rows to their slots' counts; slot -1 has none.

    Args:
        backend: where the tensors are.
        counts: of the slots.
        slots: [num_rows] int32, all different but for -1.
        token_ids: [num_rows] int64, see `sample`, like `status`.
        status: [num_rows] uint8.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    check_tensor(counts.outputs, "counts.outputs", torch.int32, (None, None))
    check_tensor(slots, "slots", torch.int32, (None,))
    check_tensor(token_ids, "token_ids", torch.int64, (len(slots),))
    check_tensor(status, "status", torch.uint8, (len(slots),))
    arguments = (counts.outputs, slots, token_ids, status, np.int32(counts.outputs.shape[1]), np.int32(len(slots)))
    _launch(backend, "penalties", "count_tokens", (-(-len(slots) // _THREADS), 1, 1), _THREADS, arguments)


def count_history(backend: Backend, counts: TokenCounts, slot: int, history: torch.Tensor, num_prompt: int) -> None:
    """Sets a slot's counts from its sequence: history [history_len] int64, the first `num_prompt` its prompt."""
    check_tensor(counts.outputs, "counts.outputs", torch.int32, (None, None))
    check_tensor(history, "history", torch.int64, (None,))
    check_tensor(counts.prompts, "counts.prompts", torch.int32, (len(counts.outputs), None))
    outputs, prompts = counts.outputs[slot], counts.prompts[slot]
    outputs.zero_()
    prompts.zero_()
    arguments = (outputs, prompts, history, np.int32(num_prompt), np.int32(len(history)))
    _launch(backend, "penalties", "count_history", (-(-len(history) // _THREADS), 1, 1), _THREADS, arguments)


def mask_logits(backend: Backend, logits: torch.Tensor, masks: Masks, row_status: torch.Tensor) -> None:
    """Sets logits that may not be sampled to -infinity, in place; rows with nothing left get NOTHING_ALLOWED.

    Args:
        backend: where the tensors are.
        logits: [num_rows, vocab_size] float32.
        masks: see `Masks`.
        row_status: [num_rows] uint8, in and out; a row that is not 0 is left alone.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    num_rows, vocab_size = _check_logits(logits)
    words = -(-vocab_size // _WORD_BITS)
    check_tensor(masks.words, "words", torch.int32, (None, words))
    check_tensor(masks.index, "index", torch.int32, (num_rows,))
    check_tensor(masks.suppressed_ids, "suppressed_ids", torch.int32, (None,))
    check_tensor(masks.suppressed_start, "suppressed_start", torch.int32, (num_rows + 1,))
    check_tensor(row_status, "row_status", torch.uint8, (num_rows,))
    arguments = (
        *(logits, row_status, masks.words, masks.index, masks.suppressed_ids, masks.suppressed_start),
        *(np.int32(vocab_size), np.int32(words)),
    )
    _launch(backend, "mask_logits", "mask_logits", (num_rows, 1, 1), _ROW_THREADS, arguments)


def sample(
    backend: Backend,
    logits: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sampling: SamplingColumns,
    cells: Cells,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a token a row and writes the cells of OK rows: (token, last fed position + 1).

    Args:
        backend: where the tensors are.
        logits: [num_rows, vocab_size] float32, with penalties and masks applied.
        rows: row_status [num_rows] uint8, a row that is not 0 is not sampled and keeps it; slots [num_rows] int32,
            all different; positions [num_rows] int64, fed last.
        sampling: see `SamplingColumns`.
        cells: written.

    Returns:
        (token_ids [num_rows] int64, undefined where the status is not OK; status [num_rows] uint8, a `RowStatus`).

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    num_rows, vocab_size = _check_logits(logits)
    row_status, slots, positions = rows
    check_tensor(row_status, "row_status", torch.uint8, (num_rows,))
    check_tensor(slots, "slots", torch.int32, (num_rows,))
    check_tensor(positions, "positions", torch.int64, (num_rows,))
    columns = (
        *(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p),
        *(sampling.seed, sampling.choice_index, sampling.output_index),
    )
    dtypes = (*(torch.float32,) * 2, torch.int32, torch.float32, *(torch.int64,) * 3)
    for place, (column, dtype) in enumerate(zip(columns, dtypes, strict=True)):
        check_tensor(column, f"sampling column {place}", dtype, (num_rows,))
    check_tensor(cells.tokens, "cells.tokens", torch.int64, (len(cells.positions),))
    check_tensor(cells.positions, "cells.positions", torch.int64, (len(cells.tokens),))
    token_ids = backend.allocate((num_rows,), torch.int64)
    status = backend.allocate((num_rows,), torch.uint8)
    arguments = (
        *(token_ids, status, cells.tokens, cells.positions, logits, row_status, slots, positions),
        *(*columns, np.int32(vocab_size)),
    )
    shared_bytes = -(-vocab_size // TILE) * 8
    _launch(backend, "sample", "sample", (num_rows, 1, 1), _ROW_THREADS, arguments, shared_bytes)
    return token_ids, status


def keep_drawable(
    backend: Backend,
    logits: torch.Tensor,
    status: torch.Tensor,
    selected: torch.Tensor,
    sampling: SamplingColumns,
) -> None:
    """Turns rows into `reference.sampling.processed_log_weights`, in place, behind `sample`.

    Args:
        backend: where the tensors are.
        logits: [num_rows, vocab_size] float32, as `sample` read them.
        status: [num_rows] uint8, `sample`'s; a row that is not 0 is left alone.
        selected: [num_rows] uint8, 0 leaves the row alone.
        sampling: see `SamplingColumns`.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    num_rows, vocab_size = _check_logits(logits)
    for tensor, name in ((status, "status"), (selected, "selected")):
        check_tensor(tensor, name, torch.uint8, (num_rows,))
    columns = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
    dtypes = (torch.float32, torch.float32, torch.int32, torch.float32)
    for place, (column, dtype) in enumerate(zip(columns, dtypes, strict=True)):
        check_tensor(column, f"sampling column {place}", dtype, (num_rows,))
    arguments = (logits, status, selected, *columns, np.int32(vocab_size))
    _launch(backend, "sample", "keep_drawable", (num_rows, 1, 1), _ROW_THREADS, arguments)


def logprobs(
    backend: Backend, logits: torch.Tensor, token_ids: torch.Tensor, status: torch.Tensor, num_wanted: torch.Tensor
) -> Logprobs:
    """Log probabilities over log weights; RAW ones over the untouched logits. See `reference.logprobs`.

    Args:
        backend: where the tensors are.
        logits: [num_rows, vocab_size] float32.
        token_ids: [num_rows] int64, whose record each row wants.
        status: [num_rows] uint8, a row that is not 0 gets no record.
        num_wanted: [num_rows] int32, most probable ids to list, at most MAX_LISTED.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    num_rows, vocab_size = _check_logits(logits)
    check_tensor(token_ids, "token_ids", torch.int64, (num_rows,))
    check_tensor(status, "status", torch.uint8, (num_rows,))
    check_tensor(num_wanted, "num_wanted", torch.int32, (num_rows,))
    result = Logprobs(
        token_logprobs=backend.allocate((num_rows,), torch.float32),
        ranks=backend.allocate((num_rows,), torch.int32),
        num_listed=backend.allocate((num_rows,), torch.int32),
        listed_ids=backend.allocate((num_rows, MAX_LISTED), torch.int32),
        listed_logprobs=backend.allocate((num_rows, MAX_LISTED), torch.float32),
    )
    arguments = (
        *(result.token_logprobs, result.ranks, result.num_listed, result.listed_ids, result.listed_logprobs),
        *(logits, token_ids, status, num_wanted, np.int32(vocab_size)),
    )
    _launch(backend, "logprobs", "logprobs", (num_rows, 1, 1), _ROW_THREADS, arguments)
    return result


def _check_logits(logits: torch.Tensor) -> tuple[int, int]:
    check_tensor(logits, "logits", torch.float32, (None, None))
    num_rows, vocab_size = logits.shape
    if not 0 < vocab_size <= _MAX_VOCAB:
        message = f"logits have {vocab_size} ids, kernels take 1 to {_MAX_VOCAB}"
        raise KernelArgumentError(message)
    return num_rows, vocab_size


def _launch(
    backend: Backend,
    source: str,
    kernel: str,
    grid: tuple[int, int, int],
    num_threads: int,
    arguments: tuple[torch.Tensor | np.int32, ...],
    shared_bytes: int = 0,
) -> None:
    backend.launch(
        Launch(
            module=Module(source),
            kernel=kernel,
            grid=grid,
            num_threads=num_threads,
            arguments=arguments,
            shared_bytes=shared_bytes,
        )
    )
