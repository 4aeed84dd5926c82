"""`Ops` on CUDA: torch for matrix products, the kernels of this package for everything else.

`prepare` and `attend` serve any caller with host arrays; a caller whose tokens are known on the device only looks
them up there (`inputs.resolve_inputs`) and makes the prepared step of what it finds (`resolved_step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone reads
from numpy.typing import NDArray

from stepahead.kernels.block_tables import LayerGroups
from stepahead.kernels.cuda.attention import AttentionOptions, paged_chunk, paged_decode
from stepahead.kernels.cuda.backend import Backend
from stepahead.kernels.cuda.cache import change_blocks, write_kv
from stepahead.kernels.cuda.elementwise import add_rms_norm, gated_activation, rms_norm, rope
from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.inputs import gather_rows
from stepahead.kernels.cuda.step_arrays import PackedArrays, StepArrays, arrange
from stepahead.kernels.ops import AttentionShape, PackedLinear, PreparedStep, StepLayout
from stepahead.kernels.reference.rope import RopeConfig, rope_tables

DETERMINISTIC_ROWS = 128
"""Rows of every matrix product in deterministic mode."""


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
        shape: of the model's attention.
        dtype: of weights, activations and KV cache.
        backend: the device.
        deterministic: a token's bits depend on no other token: cuBLAS chooses its kernels by the number of rows, so
            every matrix product has DETERMINISTIC_ROWS of them, the last ones zeros. Slower.
    """

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, backend: Backend, *, deterministic: bool = False
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._backend = backend
        self._deterministic = deterministic
        layers = [shape.layer(index) for index in range(shape.num_layers)]
        self._options = [
            AttentionOptions(scale=shape.scale, soft_cap=shape.cap or 0.0, window=layer.window or 0)
            for layer in layers
        ]
        self._ropes = [layer.rope for layer in layers]
        self._cache: torch.Tensor | None = None
        self._tables: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        return self._dtype

    @property
    def host_may_look(self) -> bool:
        """See `Ops.host_may_look`."""
        return False

    def place(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Ops.place`."""
        memory = self._backend.allocate(tuple(tensor.shape), dtype)
        self._backend.copy(memory, tensor)
        return memory

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CudaLinear:
        """See `Ops.pack_linear`."""
        return CudaLinear(self.place(weight, self._dtype), None if bias is None else self.place(bias, self._dtype))

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See `Ops.linear`."""
        linear = cast("CudaLinear", packed)
        if not self._deterministic:
            return F.linear(x, linear.weight, linear.bias)
        padded = F.pad(x, (0, 0, 0, -len(x) % DETERMINISTIC_ROWS))
        starts = range(0, len(padded), DETERMINISTIC_ROWS)
        tiles = [padded[start : start + DETERMINISTIC_ROWS] for start in starts]
        return torch.cat([F.linear(tile, linear.weight, linear.bias) for tile in tiles])[: len(x)]

    def take_rows(self, table: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """See `Ops.take_rows`."""
        return gather_rows(self._backend, table, self._backend.upload(rows))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        out = self._backend.allocate(tuple(x.shape), x.dtype)
        rms_norm(self._backend, x, weight, eps, out)
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Ops.add_rms_norm`."""
        return add_rms_norm(self._backend, residual, x, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.silu_mul`."""
        return gated_activation(self._backend, gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.gelu_tanh_mul`."""
        return gated_activation(self._backend, gate_up, "gelu_tanh")

    def allocate_cache(
        self, num_blocks: int, block_size: int, max_positions: int, groups: LayerGroups | None = None
    ) -> int:
        """See `Ops.allocate_cache`; all layers are one group: a window's blocks are kept."""
        if groups is not None:
            raise KernelArgumentError("all layers share one block table: no groups")
        shape = self._shape
        sizes = (shape.num_layers, num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        self.free_cache()
        self._cache = self._backend.allocate(sizes, self._dtype)
        self._cache.zero_()
        for config in {turning for turning in self._ropes if turning is not None}:
            cos, sin = rope_tables(config, max_positions)
            self._tables[config] = (self._backend.upload(cos), self._backend.upload(sin))
        return self._cache.numel() * self._cache.element_size()

    def free_cache(self) -> None:
        """Gives the KV cache's memory back, if there is one."""
        self._cache = None

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """See `Ops.change_blocks`."""
        change_blocks(self._backend, self._allocated, copies, zeroed)

    def arrange(self, layout: StepLayout) -> StepArrays:
        """Returns a layout's arrays in the order in which `attend` wants its tokens."""
        group = self._shape.num_heads // self._shape.num_kv_heads
        return arrange(layout, group, by_chunk=self._dtype != torch.float32)

    def prepare(self, layout: StepLayout) -> CudaStep:
        """See `Ops.prepare`. No block needs to be cleared: see the KV layout in `cache`."""
        arrays = self.arrange(layout)
        lens = (arrays.positions + 1).astype(np.int32)
        on_device = PackedArrays(kernel_arrays(arrays) | {"visible_lens": lens}).upload(self._backend)
        return resolved_step(arrays, on_device, on_device["slot_mapping"], on_device["visible_lens"])

    def attend(self, layer: int, qkv: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        """See `Ops.attend`."""
        own = cast("CudaStep", step)
        backend, shape, options = self._backend, self._shape, self._options[layer]
        cache, turning = self._allocated[layer], self._ropes[layer]
        heads = qkv.view(len(qkv), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        if turning is not None:
            rope(backend, heads[:, : shape.num_heads + shape.num_kv_heads], own.positions, self._tables[turning])
        write_kv(backend, cache, heads[:, shape.num_heads :], own.slot_mapping)
        queries, split = heads[:, : shape.num_heads], own.num_chunk_tokens
        out = backend.allocate((len(qkv), shape.num_heads, shape.head_dim), self._dtype)
        if split:
            paged_chunk(backend, out[:split], queries[:split], cache, own.chunks, options)
        if split < len(qkv):
            paged_decode(backend, out[split:], queries[split:], cache, own.queries, options, own.max_context)
        return out.view(len(qkv), -1)

    @property
    def _allocated(self) -> torch.Tensor:
        assert self._cache is not None, "allocate_cache comes before the first step"
        return self._cache


def kernel_arrays(arrays: StepArrays) -> dict[str, NDArray[np.generic]]:
    """Returns what `resolved_step` looks for on the device."""
    return {
        "positions": arrays.positions,
        "slot_mapping": arrays.slot_mapping,
        "rows": arrays.rows,
        "tiles": arrays.tiles,
        "chunk_start_loc": arrays.chunk_start_loc,
        "chunk_lens": arrays.chunk_lens,
        "chunk_tables": arrays.chunk_tables,
        "block_tables": arrays.block_tables,
    }


def resolved_step(
    arrays: StepArrays,
    on_device: dict[str, torch.Tensor],
    slot_mapping: torch.Tensor,
    visible_lens: torch.Tensor,
) -> CudaStep:
    """Returns a prepared step.

    Args:
        arrays: of the step.
        on_device: its `kernel_arrays`.
        slot_mapping: [num_tokens] int64, a kv_slot, or -1 for a token that writes nothing.
        visible_lens: [num_tokens] int32, positions each token sees where it attends alone; 0 for a hole.
    """
    split = arrays.num_chunk_tokens
    return CudaStep(
        token_order=arrays.token_order,
        positions=on_device["positions"],
        slot_mapping=slot_mapping,
        num_chunk_tokens=split,
        chunks=(
            on_device["tiles"],
            on_device["chunk_start_loc"],
            on_device["chunk_lens"],
            on_device["chunk_tables"],
        ),
        queries=(on_device["rows"][split:], visible_lens[split:], on_device["block_tables"]),
        max_context=arrays.max_context,
    )
