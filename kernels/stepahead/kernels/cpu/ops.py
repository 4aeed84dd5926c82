"""`Ops` on the CPU in plain torch: oneDNN-packed bfloat16 linears, plain float32 ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone reads
from numpy.typing import NDArray

from stepahead.kernels.block_tables import LayerGroups
from stepahead.kernels.cpu.attention import CacheSize, PagedAttention
from stepahead.kernels.cpu.host_arrays import as_tensor
from stepahead.kernels.cpu.step_layout import CpuStep
from stepahead.kernels.ops import AttentionShape, PackedLinear, PreparedStep, StepLayout

_PACK_BATCH = 32
"""Batch size oneDNN chooses the packed layout for; decode batches are near it."""


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A weight as `CpuOps` multiplies by it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    packed: bool


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX)."""
    supported = cast("Callable[[], bool]", torch.ops.mkldnn._is_mkldnn_bf16_supported)
    return torch.backends.mkldnn.is_available() and supported()


class CpuOps:
    """The CPU's operations. One instance per model: it owns the KV cache."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._pack = dtype == torch.bfloat16 and has_fast_bfloat16()
        self._attention: PagedAttention | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        return self._dtype

    @property
    def host_may_look(self) -> bool:
        """See `Ops.host_may_look`."""
        return True

    def place(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Ops.place`."""
        return tensor.to(dtype, copy=True)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CpuLinear:
        """See `Ops.pack_linear`."""
        plain = weight.to(self._dtype, copy=True).contiguous()
        if self._pack:
            reorder = cast("Callable[..., torch.Tensor]", torch.ops.mkldnn._reorder_linear_weight)
            plain = reorder(plain, _PACK_BATCH)
        own_bias = None if bias is None else bias.to(self._dtype)
        return CpuLinear(plain, own_bias, weight.shape[0], self._pack)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See `Ops.linear`."""
        linear = cast("CpuLinear", packed)
        if linear.packed:
            multiply = cast("Callable[..., torch.Tensor]", torch.ops.mkldnn._linear_pointwise)
            return multiply(x, linear.weight, linear.bias, "none", [], "")
        return F.linear(x, linear.weight, linear.bias)

    def take_rows(self, table: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """See `Ops.take_rows`."""
        return table.index_select(0, as_tensor(rows))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Ops.add_rms_norm`."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.silu_mul`."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.gelu_tanh_mul`."""
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def allocate_cache(
        self, num_blocks: int, block_size: int, max_positions: int, groups: LayerGroups | None = None
    ) -> int:
        """See `Ops.allocate_cache`."""
        size = CacheSize(num_blocks, block_size, max_positions, groups)
        self._attention = PagedAttention(self._shape, size, self._dtype)
        return self._attention.num_bytes

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """See `Ops.change_blocks`."""
        self._allocated.change_blocks(copies, zeroed)

    def prepare(self, layout: StepLayout) -> CpuStep:
        """See `Ops.prepare`."""
        return self._allocated.prepare(layout)

    def attend(self, layer: int, qkv: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        """See `Ops.attend`."""
        return self._allocated.attend(layer, qkv, cast("CpuStep", step))

    @property
    def _allocated(self) -> PagedAttention:
        assert self._attention is not None, "allocate_cache comes before the first step"
        return self._attention
