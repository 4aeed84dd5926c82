"""What a decoder asks of a device: the `Ops` protocol.

A decoder is the same lines of Python on every device; what differs is behind these operations. `reference` says
what each computes; a backend may fuse, reorder tokens (it says how in `PreparedStep.token_order`) and choose its
own forms for packed weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.block_tables import GroupLayout, LayerGroups
from stepahead.kernels.reference.attention import LayerAttention
from stepahead.kernels.reference.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes every layer shares, and in what layers differ."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig
    cap: float | None = None
    """Bound on the scores, see `reference.attention.paged_attention`."""
    layers: tuple[LayerAttention, ...] = ()
    """[num_layers], or empty: every layer turns by `rope` and sees all."""

    def layer(self, index: int) -> LayerAttention:
        """Returns what a layer attends with."""
        return self.layers[index] if self.layers else LayerAttention(rope=self.rope)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Where the tokens of a step go. Tokens of a row are neighbours; all arrays are on the host.

    A row needs the entries of a table from its first query's window on to its last token; in front of them stands
    `block_tables.NULL_BLOCK` where the group has a window, or the row a floor.
    """

    positions: NDArray[np.int64]  # [num_tokens]
    slot_mapping: NDArray[np.int64]  # [num_tokens], `block_tables.NO_SLOT` where nothing is written
    query_start_loc: NDArray[np.int32]  # [num_rows + 1]
    seq_lens: NDArray[np.int32]  # [num_rows]
    block_tables: NDArray[np.int32]  # [num_rows, width], entries past a row's need are not read
    more_groups: tuple[GroupLayout, ...] = ()
    """Of the groups 1 and up; `slot_mapping`, `block_tables` and `floors` are group 0's."""
    floors: NDArray[np.int32] | None = None
    """[num_rows]: in the group's layers a row sees nothing in front of this position, which is the first of a block
    and at most the row's own first. None: 0 for all rows."""


class PackedLinear(Protocol):
    """A weight matrix in the form a backend multiplies by."""

    @property
    def out_features(self) -> int:
        """Width of the result."""
        ...


class PreparedStep(Protocol):
    """A step's layout in the form a backend needs, made once and used by every layer."""

    @property
    def token_order(self) -> NDArray[np.int64]:
        """[num_tokens]: the backend's i-th token is token `token_order[i]` of the layout."""
        ...


class Ops(Protocol):
    """The operations. All activations are [num_tokens, features] of the backend's dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        ...

    @property
    def host_may_look(self) -> bool:
        """Whether the host may read a tensor in the middle of a step without holding the device up."""
        ...

    def place(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a copy in the device's memory; the caller drops its own."""
        ...

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Takes weight [out, in] and bias [out], any float dtype; the caller drops them afterwards."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Returns x @ weight.T + bias, [num_tokens, out]."""
        ...

    def take_rows(self, table: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """Returns [len(rows), features]: embeddings of token ids, or some tokens' activations."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `reference.elementwise.rms_norm`; normalises the last axis.

        The weight is of x's dtype, or float32: then the product is taken in float32 before it is rounded.
        """
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds x to the residual in place, rounded to its dtype; returns `rms_norm` of the sum.

        Args:
            residual: [num_tokens, size].
            x: as residual.
            weight: [size], see `rms_norm`.
            eps: added to the mean square.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `reference.elementwise.silu_mul`."""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `reference.elementwise.gelu_tanh_mul`."""
        ...

    def allocate_cache(
        self, num_blocks: int, block_size: int, max_positions: int, groups: LayerGroups | None = None
    ) -> int:
        """Allocates the KV cache of all layers, every byte written; returns its bytes.

        Args:
            num_blocks: blocks a plan may name (of group 0).
            block_size: kv_slots per block.
            max_positions: positions stay below this.
            groups: None: all layers are group 0.
        """
        ...

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """Copies blocks (source, destination), then sets blocks to zero, in all layers; they must be one group."""
        ...

    def prepare(self, layout: StepLayout) -> PreparedStep:
        """Turns a layout into the backend's form and clears the blocks it begins to write."""
        ...

    def attend(self, layer: int, qkv: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        """Rotates queries and keys, stores keys and values, and attends, as `AttentionShape.layer(layer)` says.

        Args:
            layer: 0 and up.
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] in the step's token order; overwritten.
            step: from `prepare`.

        Returns:
            [num_tokens, num_heads * head_dim], see `reference.attention.paged_attention`.
        """
        ...
