"""Paged caches with shuffled blocks, and attention over them from its definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stepahead.kernels.cuda.attention import AttentionOptions, chunk_tiles, paged_chunk, paged_decode
from stepahead.kernels.reference.attention import paged_attention

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest absolute error of attention over values of unit variance: rounding of weights, values and the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows over one layer's cache. What no row has written is NaN: a kernel that reads it shows."""

    heads: Heads
    cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    queries: torch.Tensor  # [num_tokens, num_heads, head_dim], a view of wider rows as qkv is
    query_start_loc: np.ndarray

    @classmethod
    def make(cls, dtype, heads, seq_lens, counts=None, seed=0):
        """Rows of `seq_lens`, the last `counts` tokens of each are queries (1 by default)."""
        random = np.random.default_rng(seed)
        counts = np.ones(len(seq_lens), np.int64) if counts is None else np.asarray(counts)
        blocks_of = [-(-length // heads.block_size) for length in seq_lens]
        order = random.permutation(sum(blocks_of) + 1)
        tables = np.full((len(seq_lens), max(*blocks_of, 1)), -1, np.int32)  # past a row's need: no block at all
        shape = (len(order), 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
        cache = torch.full(shape, torch.nan, dtype=dtype)
        used = 0
        for row, length in enumerate(seq_lens):
            tables[row, : blocks_of[row]] = order[used : used + blocks_of[row]]
            used += blocks_of[row]
            for position in range(length):
                values = random.standard_normal((2, heads.num_kv_heads, heads.head_dim), np.float32)
                block = int(tables[row, position // heads.block_size])
                cache[block, :, :, position % heads.block_size] = torch.from_numpy(values).to(dtype)
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        width = heads.num_heads + 2 * heads.num_kv_heads
        rows = random.standard_normal((int(start[-1]), width, heads.head_dim), np.float32)
        queries = torch.from_numpy(rows).to(dtype)[:, : heads.num_heads]
        return cls(
            heads, cache, torch.from_numpy(tables), torch.tensor(seq_lens, dtype=torch.int32), queries, start
        )

    def decode(self, backend, options, max_context=None):
        """Every query alone, as `paged_decode` takes them."""
        counts = np.diff(self.query_start_loc)
        rows = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        place = np.arange(self.query_start_loc[-1]) - np.repeat(self.query_start_loc[1:], counts) + 1
        lens = np.repeat(self.seq_lens.numpy(), counts) + place
        lens = np.maximum(lens, 0).astype(np.int32)
        arrays = (torch.from_numpy(rows), torch.from_numpy(lens), self.block_tables)
        out = backend.allocate(tuple(self.queries.shape), self.cache.dtype)
        longest = int(max_context or max(lens.max(), 1))
        paged_decode(backend, out, self.queries, self.cache, arrays, options, longest)
        return out

    def chunk(self, backend, options):
        tiles = torch.from_numpy(chunk_tiles(self.query_start_loc, self.heads.group))
        arrays = (tiles, torch.from_numpy(self.query_start_loc), self.seq_lens, self.block_tables)
        out = backend.allocate(tuple(self.queries.shape), self.cache.dtype)
        paged_chunk(backend, out, self.queries, self.cache, arrays, options)
        return out

    def expected(self, options):
        """[num_tokens, num_heads, head_dim] float64, query by query from the formula."""
        out = np.zeros(self.queries.shape, np.float64)
        cache, queries = self.cache.double().numpy(), self.queries.double().numpy()
        heads = self.heads
        for row, length in enumerate(self.seq_lens.tolist()):
            first, end = self.query_start_loc[row : row + 2]
            for token in range(first, end):
                last = length - (end - token)
                begin = max(0, last - options.window + 1) if options.window else 0
                positions = np.arange(begin, last + 1)
                if not len(positions):
                    continue
                blocks = self.block_tables[row].numpy()[positions // heads.block_size]
                keys, values = (cache[blocks, part, :, positions % heads.block_size] for part in range(2))
                for head in range(heads.num_heads):
                    scores = keys[:, head // heads.group] @ queries[token, head] * options.scale
                    if options.soft_cap:
                        scores = options.soft_cap * np.tanh(scores / options.soft_cap)
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights @ values[:, head // heads.group] / weights.sum()
        return out

    def reference_rows(self, options):
        """The same by `reference.attention.paged_attention`, which knows neither window nor soft cap."""
        parts = []
        for row, length in enumerate(self.seq_lens.tolist()):
            first, end = self.query_start_loc[row : row + 2]
            queries = self.queries[first:end].float().numpy()
            table = self.block_tables[row].numpy()
            cache = np.nan_to_num(self.cache.float().numpy())
            parts.append(paged_attention(queries, cache, table, length, options.scale))
        return np.concatenate(parts)

    def error(self, result, options):
        return np.abs(result.double().numpy() - self.expected(options)).max()


def options_for(heads, **changes):
    return AttentionOptions(scale=heads.head_dim**-0.5, **changes)
