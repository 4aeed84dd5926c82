"""Steps that belong to nobody: the largest there may be, for measuring memory, and rows that pad other steps.

Every row is slot 0's, reads block 0 at most, and writes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepahead.worker.runner import LAST_SAMPLE, CacheShape, SamplingColumns, StepBatch


def hole_rows(shape: CacheShape, num_rows: int) -> StepBatch:
    """Returns rows of one token that feed their cell at position 0, where no cell ever is: holes."""
    return _batch(
        shape,
        np.ones(num_rows, np.int64),
        token_id=LAST_SAMPLE,
        positions=np.zeros(num_rows, np.int64),
        seq_lens=np.zeros(num_rows, np.int32),
    )


def largest_chunks(shape: CacheShape) -> StepBatch:
    """Returns prompt chunks, as long as a sequence may be, of as many tokens as a step may feed."""
    longest, total = shape.max_model_len, shape.max_num_batched_tokens
    lengths = [min(longest, total - start) for start in range(0, total, longest)]
    counts = np.array(lengths[: shape.max_num_seqs], np.int64)
    ends: list[int] = counts.tolist()
    positions = np.concatenate([np.arange(end, dtype=np.int64) for end in ends])
    return _batch(shape, counts, token_id=0, positions=positions, seq_lens=counts.astype(np.int32))


def _batch(
    shape: CacheShape,
    counts: NDArray[np.int64],
    *,
    token_id: int,
    positions: NDArray[np.int64],
    seq_lens: NDArray[np.int32],
) -> StepBatch:
    num_rows, num_tokens = len(counts), len(positions)
    integers = np.zeros(num_rows, np.int64)
    return StepBatch(
        step_id=0,
        slots=integers.astype(np.int32),
        token_ids=np.full(num_tokens, token_id, np.int64),
        positions=positions,
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=np.zeros((num_rows, -(-shape.max_model_len // shape.block_size)), np.int32),
        slot_mapping=np.full(num_tokens, -1, np.int64),
        sample_rows=np.arange(num_rows, dtype=np.int32),
        sampling=SamplingColumns(
            temperature=np.zeros(num_rows, np.float32),
            top_p=np.ones(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            min_p=np.zeros(num_rows, np.float32),
            seed=np.zeros(num_rows, np.uint64),
            choice_index=integers,
            output_index=integers,
        ),
        invalidated_slots=np.zeros(0, np.int32),
    )
