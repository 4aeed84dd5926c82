"""`Ops` on CUDA: torch for matrix products, the kernels of this package for everything else.

    tokens, reordered   rows of several tokens, row by row | rows of one token
                        paged_chunk                        | paged_decode

float32 has no tensor-core path: there every token is a query of `paged_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone reads
from numpy.typing import NDArray

from stepahead.kernels.block_tables import LayerGroups
from stepahead.kernels.cuda.attention import AttentionOptions, chunk_tiles, paged_chunk, paged_decode
from stepahead.kernels.cuda.backend import Backend
from stepahead.kernels.cuda.cache import change_blocks, to_device, write_kv
from stepahead.kernels.cuda.elementwise import gated_activation, rms_norm, rope
from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.inputs import gather_rows
from stepahead.kernels.ops import AttentionShape, PackedLinear, PreparedStep, StepLayout
from stepahead.kernels.reference.rope import rope_tables


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """A weight on the device."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        """Width of the result."""
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaStep:
    """A prepared step; tensors are on the device."""

    token_order: NDArray[np.int64]
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    num_chunk_tokens: int
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """Of the first num_chunk_tokens tokens, see `paged_chunk`."""
    queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Of the other tokens, see `paged_decode`."""
    max_context: int


class CudaOps:
    """The operations on one device. One instance per model: it owns the KV cache.

    Args:
        shape: sizes every layer shares.
        dtype: of weights, activations and KV cache.
        backend: the device.

    Raises:
        KernelArgumentError: the shape's layers differ, or its scores are capped.
    """

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, backend: Backend) -> None:
        if shape.layers or shape.cap is not None:
            raise KernelArgumentError("every layer attends to everything: no windows, soft caps or rope per layer")
        self._shape = shape
        self._dtype = dtype
        self._backend = backend
        self._options = AttentionOptions(scale=shape.scale)
        self._cache: torch.Tensor | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        return self._dtype

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CudaLinear:
        """See `Ops.pack_linear`."""
        return CudaLinear(self._owned(weight), None if bias is None else self._owned(bias))

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See `Ops.linear`."""
        linear = cast("CudaLinear", packed)
        return F.linear(x, linear.weight, linear.bias)

    def take_rows(self, table: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """See `Ops.take_rows`."""
        return gather_rows(self._backend, table, to_device(self._backend, rows))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        out = self._backend.allocate(tuple(x.shape), x.dtype)
        rms_norm(self._backend, x, weight, eps, out)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.silu_mul`."""
        return gated_activation(self._backend, gate_up)

    def allocate_cache(
        self, num_blocks: int, block_size: int, max_positions: int, groups: LayerGroups | None = None
    ) -> int:
        """See `Ops.allocate_cache`; layers are one group, as they have no windows."""
        if groups is not None:
            raise KernelArgumentError("all layers share one block table: no groups")
        shape = self._shape
        sizes = (shape.num_layers, num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        self._cache = self._backend.allocate(sizes, self._dtype)
        self._cache.zero_()
        cos, sin = rope_tables(shape.rope, max_positions)
        self._tables = (to_device(self._backend, cos), to_device(self._backend, sin))
        return self._cache.numel() * self._cache.element_size()

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """See `Ops.change_blocks`."""
        change_blocks(self._backend, self._allocated[0], copies, zeroed)

    def prepare(self, layout: StepLayout) -> CudaStep:
        """See `Ops.prepare`. No block needs to be cleared: see the KV layout in `cache`."""
        counts = np.diff(layout.query_start_loc).astype(np.int64)
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        by_chunk = counts > 1 if self._dtype != torch.float32 else np.zeros(len(counts), np.bool_)
        chunk_rows = np.flatnonzero(by_chunk)
        in_chunk = by_chunk[row_of_token]
        order = np.concatenate([np.flatnonzero(in_chunk), np.flatnonzero(~in_chunk)])
        start_loc = np.concatenate([[0], np.cumsum(counts[chunk_rows])]).astype(np.int32)
        tiles = chunk_tiles(start_loc, self._shape.num_heads // self._shape.num_kv_heads)
        chunks = (tiles, start_loc, layout.seq_lens[chunk_rows], layout.block_tables[chunk_rows])
        alone = order[start_loc[-1] :]
        lens = (layout.positions[alone] + 1).astype(np.int32)
        queries = (row_of_token[alone].astype(np.int32), lens, layout.block_tables)
        return CudaStep(
            token_order=order,
            positions=to_device(self._backend, layout.positions[order]),
            slot_mapping=to_device(self._backend, layout.slot_mapping[order]),
            num_chunk_tokens=int(start_loc[-1]),
            chunks=(
                to_device(self._backend, chunks[0]),
                to_device(self._backend, chunks[1]),
                to_device(self._backend, chunks[2]),
                to_device(self._backend, chunks[3]),
            ),
            queries=(
                to_device(self._backend, queries[0]),
                to_device(self._backend, queries[1]),
                to_device(self._backend, queries[2]),
            ),
            max_context=int(lens.max(initial=1)),
        )

    def attend(self, layer: int, qkv: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        """See `Ops.attend`."""
        own = cast("CudaStep", step)
        backend, shape = self._backend, self._shape
        caches, tables = self._allocated
        cache = caches[layer]
        heads = qkv.view(len(qkv), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        rope(backend, heads[:, : shape.num_heads + shape.num_kv_heads], own.positions, tables)
        write_kv(backend, cache, heads[:, shape.num_heads :], own.slot_mapping)
        queries, split = heads[:, : shape.num_heads], own.num_chunk_tokens
        out = backend.allocate((len(qkv), shape.num_heads, shape.head_dim), self._dtype)
        if split:
            paged_chunk(backend, out[:split], queries[:split], cache, own.chunks, self._options)
        if split < len(qkv):
            paged_decode(backend, out[split:], queries[split:], cache, own.queries, self._options, own.max_context)
        return out.view(len(qkv), -1)

    def _owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device: the caller drops its own."""
        return tensor.to(device=self._backend.device, dtype=self._dtype, copy=True).contiguous()

    @property
    def _allocated(self) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        assert self._cache is not None, "allocate_cache comes before the first step"
        assert self._tables is not None
        return self._cache, self._tables
