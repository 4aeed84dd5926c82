"""The decoder: one forward pass over the tokens of a step, whatever rows they belong to.

embed -> per layer: norm, qkv, [qk-norm], attend, output + residual, norm, gate and up, silu, down + residual
      -> norm and vocabulary head for the tokens that need logits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.ops import AttentionShape, Ops, PackedLinear, StepLayout
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.tensor_reader import TensorReader
from stepahead.worker.model.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer."""

    attention_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a decoder, packed for a device."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: PackedLinear


def attention_shape(config: ModelConfig) -> AttentionShape:
    """Returns the sizes a backend needs."""
    return AttentionShape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        rope=config.rope,
    )


class WeightLoader:
    """Reads, fuses and packs weights, and counts the bytes read."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, ops: Ops, progress: Callable[[int, int], None]
    ) -> None:
        self._config = config
        self._reader = TensorReader(source, progress)
        self._ops = ops

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights read so far, in the device's dtype."""
        return self._reader.num_parameters * self._ops.dtype.itemsize

    def load(self) -> DecoderWeights:
        """Returns all weights.

        Raises:
            ModelError: a tensor is missing or has another shape than the configuration says.
        """
        config = self._config
        embedding = self._reader.read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = tuple(self._layer(f"model.layers.{index}.") for index in range(config.num_layers))
        final_norm = self._vector("model.norm.weight", config.hidden_size)
        head = embedding
        if not config.tied_embeddings:
            head = self._reader.read("lm_head.weight", (config.vocab_size, config.hidden_size))
        weights = DecoderWeights(
            embedding=embedding.to(self._ops.dtype, copy=True),  # the source's files may go away
            layers=layers,
            final_norm=final_norm,
            head=self._ops.pack_linear(head, None),
        )
        self._reader.finish()
        return weights

    def _layer(self, prefix: str) -> Layer:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            attention_norm=self._vector(prefix + "input_layernorm.weight", hidden),
            qkv=self._fused(
                {attention + "q_proj": queries, attention + "k_proj": keys, attention + "v_proj": keys},
                hidden,
                has_bias=config.qkv_bias,
            ),
            output=self._fused({attention + "o_proj": hidden}, queries, has_bias=config.output_bias),
            mlp_norm=self._vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._fused(
                {mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, has_bias=config.mlp_bias
            ),
            down=self._fused({mlp + "down_proj": hidden}, inner, has_bias=config.mlp_bias),
            query_norm=self._head_norm(attention + "q_norm.weight"),
            key_norm=self._head_norm(attention + "k_norm.weight"),
        )

    def _fused(self, outputs: dict[str, int], num_inputs: int, *, has_bias: bool) -> PackedLinear:
        """Packs the linears that read the same input as one, rows in the order given."""
        weights = [self._reader.read(f"{name}.weight", (size, num_inputs)) for name, size in outputs.items()]
        bias = None
        if has_bias:
            bias = torch.cat([self._reader.read(f"{name}.bias", (size,)) for name, size in outputs.items()])
        return self._ops.pack_linear(torch.cat(weights), bias)

    def _head_norm(self, name: str) -> torch.Tensor | None:
        return self._vector(name, self._config.head_dim) if self._config.qk_norm else None

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self._reader.read(name, (size,)).to(self._ops.dtype, copy=True)


class Decoder:
    """A loaded model: token ids in, logits out. Holds no request state but the KV cache inside `ops`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops

    def forward(
        self, token_ids: NDArray[np.int64], layout: StepLayout, logit_tokens: NDArray[np.int64]
    ) -> torch.Tensor:
        """Feeds the tokens of a step.

        Args:
            token_ids: [num_tokens] int64, all real ids.
            layout: where they go.
            logit_tokens: [num_logits] indexes into token_ids.

        Returns:
            [num_logits, vocab_size] float32.
        """
        ops, eps = self._ops, self._config.norm_eps
        step = ops.prepare(layout)
        x = ops.take_rows(self._weights.embedding, token_ids[step.token_order])
        for index, layer in enumerate(self._weights.layers):
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)
            if layer.query_norm is not None and layer.key_norm is not None:
                self._normalize_heads(qkv, layer.query_norm, layer.key_norm)
            x = x + ops.linear(ops.attend(index, qkv, step), layer.output)
            gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)
            x = x + ops.linear(ops.silu_mul(gate_up), layer.down)
        if not len(logit_tokens):
            return torch.empty(0, self._config.vocab_size)
        place = np.empty_like(step.token_order)
        place[step.token_order] = np.arange(len(place))
        last = ops.take_rows(x, place[logit_tokens])
        return ops.linear(ops.rms_norm(last, self._weights.final_norm, eps), self._weights.head).float()

    def _normalize_heads(self, qkv: torch.Tensor, query_norm: torch.Tensor, key_norm: torch.Tensor) -> None:
        """Qwen3's norm of each query and key head, in place."""
        config, eps = self._config, self._config.norm_eps
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        queries = heads[:, : config.num_heads]
        keys = heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
        queries.copy_(self._ops.rms_norm(queries, query_norm, eps))
        keys.copy_(self._ops.rms_norm(keys, key_norm, eps))
