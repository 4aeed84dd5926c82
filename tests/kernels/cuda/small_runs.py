"""Every kernel on inputs small enough for the checked build; each run returns what the kernels wrote.

Sizes are chosen so that every barrier has work on both sides: several tiles, several warps, scratch used twice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from stepahead.kernels.cuda import elementwise
from stepahead.kernels.cuda.backend import Backend
from stepahead.kernels.cuda.cache import change_blocks, write_kv
from stepahead.kernels.cuda.inputs import Cells, gather_rows, invalidate_cells, resolve_inputs
from stepahead.kernels.cuda.sampling import (
    Masks,
    PenaltyColumns,
    SamplingColumns,
    TokenCounts,
    add_bias,
    apply_penalties,
    count_history,
    count_tokens,
    keep_drawable,
    logprobs,
    mask_logits,
    sample,
)
from tests.kernels.cuda.paged import Heads, Paged, options_for

Run = Callable[[Backend], list[torch.Tensor]]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def decode(backend):
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=64)
    paged = Paged.make(torch.bfloat16, heads, [130, 0, 20])
    return [paged.decode(backend, options_for(heads, window=100, soft_cap=3.0))]


def decode_splits(backend):
    heads = Heads(num_heads=2, num_kv_heads=2, head_dim=16)
    paged = Paged.make(torch.float32, heads, [530, 3])
    return [paged.decode(backend, options_for(heads))]


def chunk(backend):
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=16)
    paged = Paged.make(torch.bfloat16, heads, [200, 9], [25, 9])
    return [paged.chunk(backend, options_for(heads, window=190))]


def norms(backend):
    x, weight, residual = normal(2, 3, 520, dtype=torch.bfloat16), normal(520, dtype=torch.bfloat16), normal(2, 520)
    out = torch.empty_like(x)
    elementwise.rms_norm(backend, x, weight, 1e-5, out)
    added = elementwise.add_rms_norm(backend, residual, normal(2, 520, seed=1), weight.float(), 1e-5)
    wide = torch.empty_like(x)
    elementwise.rms_norm(backend, x, weight.float(), 1e-5, wide)
    return [out, added, residual, wide]


def rope_and_cache(backend):
    qkv, cache = normal(3, 8, 32, dtype=torch.bfloat16), normal(1, 5, 2, 2, 4, 32, dtype=torch.bfloat16)
    tables = (normal(9, 16, seed=1), normal(9, 16, seed=2))
    elementwise.rope(backend, qkv[:, :6], torch.tensor([8, 0, 3]), tables)
    write_kv(backend, cache[0], qkv[:, 4:], torch.tensor([3, -1, 17]))
    change_blocks(backend, cache, [(0, 1), (1, 2)], [3])
    return [qkv, cache]


def activations(backend):
    gate_up = normal(3, 2 * 40, dtype=torch.bfloat16)
    return [elementwise.gated_activation(backend, gate_up, name) for name in ("silu", "gelu", "gelu_tanh")]


def inputs(backend):
    from tests.kernels.cuda.test_inputs import FED, cells

    stored = cells()
    invalidate_cells(backend, stored, ints(3))
    resolved = resolve_inputs(backend, FED, stored)
    rows = gather_rows(backend, normal(128, 16, dtype=torch.float16), resolved.token_ids)
    return [resolved.token_ids, resolved.slot_mapping, resolved.seq_lens, resolved.row_status, rows]


VOCAB = 1100


def penalties(backend):
    logits, vocab = normal(2, VOCAB), VOCAB
    counts = TokenCounts(
        torch.zeros(2, vocab, dtype=torch.int32), torch.zeros(2, -(-vocab // 32), dtype=torch.int32)
    )
    history = torch.arange(600) % 37
    count_history(backend, counts, 1, history, 300)
    count_tokens(backend, counts, ints(1, 0), torch.tensor([5, 1099]), torch.tensor([0, 1], dtype=torch.uint8))
    count_tokens(backend, counts, ints(-1), torch.tensor([7]), torch.zeros(1, dtype=torch.uint8))
    columns = PenaltyColumns(repetition=torch.full((2,), 1.5), frequency=torch.ones(2), presence=torch.ones(2))
    apply_penalties(backend, logits, ints(0, 1), counts, columns)
    add_bias(backend, logits, (ints(0, 1), ints(3, 3), torch.tensor([1.0, 2.0])))
    return [logits, *(counts.outputs, counts.prompts)]


def masks(backend):
    logits = normal(3, VOCAB)
    words = torch.from_numpy(
        np.random.default_rng(1).integers(-(2**31), 2**31, (2, -(-VOCAB // 32))).astype(np.int32)
    )
    words[1] = 0
    # Row 1 loses its last two ids to the list, row 2 everything to the mask; suppressed ids lie in other warps.
    words[0, 1:] = 0
    allowed = [id_ for id_ in range(32) if int(words[0, 0]) >> id_ & 1]
    masks = Masks(
        words=words,
        index=ints(-1, 0, 1),
        suppressed_ids=ints(*range(700, 760), *allowed),
        suppressed_start=ints(0, 60, 60 + len(allowed), 60 + len(allowed)),
    )
    status = torch.zeros(3, dtype=torch.uint8)
    mask_logits(backend, logits, masks, status)
    return [logits, status]


def samples(backend):
    rows = 4
    logits = normal(rows, VOCAB)
    logits[1] = logits[1].round()
    columns = SamplingColumns(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.0]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.7]),
        top_k=ints(0, 700, 40, 30),
        min_p=torch.tensor([0.0, 0.01, 0.0, 0.0]),
        seed=torch.arange(rows),
        choice_index=torch.arange(rows),
        output_index=torch.arange(rows),
    )
    status = torch.tensor([0, 0, 0, 0], dtype=torch.uint8)
    cells = Cells(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    places = (status, ints(3, 1, 0, 2), torch.arange(rows))
    tokens, statuses = sample(backend, logits, places, columns, cells)
    keep_drawable(backend, logits, statuses, torch.tensor([1, 1, 0, 1], dtype=torch.uint8), columns)
    return [tokens, statuses, cells.tokens, cells.positions, logits]


def log_probabilities(backend):
    logits = normal(2, VOCAB).round(decimals=1)
    result = logprobs(backend, logits, torch.tensor([5, 900]), torch.zeros(2, dtype=torch.uint8), ints(20, 7))
    return [result.token_logprobs, result.ranks, result.num_listed, result.listed_ids, result.listed_logprobs]


RUNS: dict[str, Run] = {
    run.__name__: run
    for run in (
        decode, decode_splits, chunk, norms, rope_and_cache, activations, inputs, penalties, masks, samples,
        log_probabilities,
    )
}  # fmt: skip


def same(results, others):
    """Whether two runs wrote the same bits (NaN equals NaN)."""
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(results, others, strict=True)
    )


def largest_difference(results, others):
    """The largest absolute difference of two runs; infinite where integers, or places of NaN, differ."""
    largest = 0.0
    for one, other in zip(results, others, strict=True):
        if not one.is_floating_point():
            largest = max(largest, 0.0 if torch.equal(one, other) else np.inf)
            continue
        if not torch.equal(torch.isnan(one), torch.isnan(other)):
            return np.inf
        # Equal infinities and NaNs on both sides are no difference, though subtracting them gives NaN.
        apart = (one.double() - other.double()).abs()[(one != other) & ~torch.isnan(one)]
        largest = max(largest, float(apart.max()) if len(apart) else 0.0)
    return largest
