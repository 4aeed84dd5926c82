"""A step as the library takes it: checked arrays, and where the results go."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepahead.kernels.cpu.step.library import Batch
from stepahead.kernels.cpu.step.step_cache import StepCache, check_entries, check_shapes, step_arrays

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepahead.kernels.ops import StepLayout

LAST_SAMPLE = -1
"""A token id of a chained step: what the row's slot sampled last."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step leaves for sampling, a row per token that was asked for."""

    logits: NDArray[np.float32]  # [num_logits, vocab_size]; of a greedy step of a chain [0, vocab_size]
    best_ids: NDArray[np.int64]  # [num_logits], the lowest id of the largest logit
    best_logits: NDArray[np.float32]  # [num_logits], NaN where any logit is NaN


@dataclass(frozen=True, slots=True)
class AllocatedModel:
    """A model in the library, ready for steps."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p
    cache: StepCache
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`batch` points into `arrays` and `outputs`: whoever hands it to the library keeps them."""

    batch: Batch
    arrays: dict[str, NDArray[Any]]
    outputs: StepOutputs


def step_inputs(
    model: AllocatedModel,
    token_ids: NDArray[np.int64],
    layout: StepLayout,
    logit_tokens: NDArray[np.int64],
    logits: NDArray[np.float32] | None,
    *,
    chained: bool = False,
) -> StepInputs:
    """Returns a step that the library can run without reading or writing anything else.

    Args:
        model: whose cache the step may touch.
        token_ids: [num_tokens] int64; of a chained step LAST_SAMPLE where it is not known yet.
        layout: where they go.
        logit_tokens: [num_logits] indexes into token_ids.
        logits: [num_logits, vocab_size] float32, contiguous, to write to; None: they are not stored.
        chained: whether LAST_SAMPLE is allowed; token_ids are copied, for the library fills them in.

    Raises:
        ValueError: an array has another shape than the layout says, or an entry is out of range.
    """
    arrays = step_arrays(token_ids.copy() if chained else token_ids, layout, logit_tokens)
    check_shapes(arrays, model.cache)
    num_logits, vocab_size = len(logit_tokens), model.vocab_size
    if logits is not None and (
        logits.shape != (num_logits, vocab_size) or logits.dtype != np.float32 or not logits.flags.c_contiguous
    ):
        raise ValueError(f"logits must be float32 [{num_logits}, {vocab_size}], contiguous")
    outputs = StepOutputs(
        logits=np.empty((0, vocab_size), np.float32) if logits is None else logits,
        best_ids=np.empty(num_logits, np.int64),
        best_logits=np.empty(num_logits, np.float32),
    )
    batch = Batch(
        num_rows=len(arrays["seq_lens"]),
        num_tokens=len(token_ids),
        table_width=arrays["block_tables"].shape[2],
        num_logits=num_logits,
        logits=None if logits is None else logits.ctypes.data,
        best_ids=outputs.best_ids.ctypes.data,
        best_logits=outputs.best_logits.ctypes.data,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    # The compiled check takes microseconds where the other, which says what is wrong, takes 200: 2 % of a step.
    if not model.library.step_check(model.handle, ctypes.byref(batch), int(chained)):
        known = np.where(arrays["token_ids"] == LAST_SAMPLE, 0, arrays["token_ids"]) if chained else None
        check_entries(arrays if known is None else {**arrays, "token_ids": known}, vocab_size, model.cache)
        raise AssertionError("the compiled check refuses a step that the other one accepts")
    return StepInputs(batch, arrays, outputs)
