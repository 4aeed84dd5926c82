"""The decoder: one forward pass over the tokens of a step, whatever rows they belong to.

embed -> per layer: norm, qkv, [qk-norm], attend, output, [norm] + residual,
                    norm, gate and up, silu or gelu, down (or experts), [norm] + residual
      -> norm, vocabulary head and [soft cap] for the tokens that need logits

What stands in brackets, families have or have not; see `families`. With several ranks, each computes its shard of
every line; sums over the ranks stand behind embed, output and down, a gather behind the head (`ranks.shard`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cpu.host_arrays import as_tensor
from stepahead.kernels.ops import AttentionShape, Ops, PackedLinear, PreparedStep, StepLayout
from stepahead.worker.model.config import ModelConfig, layer_norms
from stepahead.worker.model.mixture import Mixture, Mlp, apply_mixture
from stepahead.worker.model.tensor_reader import TensorReader
from stepahead.worker.model.weights import WeightSource
from stepahead.worker.ranks.communicator import ALONE, Communicator
from stepahead.worker.ranks.shard import vocabulary_rows


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer."""

    attention_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp | Mixture
    post_mlp_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a decoder, or of a rank's shard of one, packed for a device."""

    embedding: torch.Tensor  # [vocabulary_rows, hidden_size]
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
        scale=config.attention_scale,
        rope=config.rope,
        cap=config.attention_cap,
        layers=config.layers,
    )


class WeightLoader:
    """Reads, fuses and packs weights, or one of several ranks' shard of them, and counts the bytes read."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        ops: Ops,
        progress: Callable[[int, int], None],
        num_ranks: int = 1,
    ) -> None:
        self._config = config
        self._num_ranks = num_ranks
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
        table = (vocabulary_rows(config, self._num_ranks), config.hidden_size)
        embedding = self._reader.read("model.embed_tokens.weight", table)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        final_norm = self._vector("model.norm.weight", config.hidden_size)
        head = embedding
        if not config.tied_embeddings:
            head = self._reader.read("lm_head.weight", table)
        weights = DecoderWeights(
            embedding=self._ops.place(embedding, self._ops.dtype),  # the source's files may go away
            layers=layers,
            final_norm=final_norm,
            head=self._ops.pack_linear(head, None),
        )
        self._reader.finish()
        return weights

    def _layer(self, index: int) -> Layer:
        config = self._config
        hidden, prefix = config.hidden_size, f"model.layers.{index}."
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = prefix + "self_attn."
        norms = layer_norms(config)
        return Layer(
            attention_norm=self._vector(prefix + "input_layernorm.weight", hidden),
            qkv=self._fused(
                {attention + "q_proj": queries, attention + "k_proj": keys, attention + "v_proj": keys},
                hidden,
                has_bias=config.qkv_bias,
            ),
            output=self._fused({attention + "o_proj": hidden}, queries, has_bias=config.output_bias),
            post_attention_norm=self._optional_norm(prefix, norms.after_attention),
            mlp_norm=self._vector(f"{prefix}{norms.before_mlp}.weight", hidden),
            mlp=self._mixture(prefix + "mlp.")
            if config.mixture is not None and config.mixture.layers[index]
            else self._mlp(prefix + "mlp.", config.intermediate_size),
            post_mlp_norm=self._optional_norm(prefix, norms.after_mlp),
            query_norm=self._head_norm(attention + "q_norm.weight"),
            key_norm=self._head_norm(attention + "k_norm.weight"),
        )

    def _mlp(self, prefix: str, inner: int) -> Mlp:
        hidden, has_bias = self._config.hidden_size, self._config.mlp_bias
        return Mlp(
            gate_up=self._fused(
                {prefix + "gate_proj": inner, prefix + "up_proj": inner}, hidden, has_bias=has_bias
            ),
            down=self._fused({prefix + "down_proj": hidden}, inner, has_bias=has_bias),
        )

    def _mixture(self, prefix: str) -> Mixture:
        config = self._config.mixture
        assert config is not None
        return Mixture(
            router=self._fused({prefix + "gate": config.num_experts}, self._config.hidden_size, has_bias=False),
            experts=tuple(
                self._mlp(f"{prefix}experts.{expert}.", config.intermediate_size)
                for expert in range(config.num_experts)
            ),
            experts_per_token=config.experts_per_token,
            normalized=config.normalized,
        )

    def _optional_norm(self, prefix: str, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._vector(f"{prefix}{name}.weight", self._config.hidden_size)

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
        dtype = torch.float32 if self._config.offset_norms else self._ops.dtype
        return self._ops.place(self._reader.read(name, (size,)), dtype)


class Decoder:
    """A loaded model: token ids in, logits out. Holds no request state but the KV cache inside `ops`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Ops, ranks: Communicator = ALONE) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._ranks = ranks

    def forward(
        self, token_ids: NDArray[np.int64], layout: StepLayout, logit_tokens: NDArray[np.int64]
    ) -> torch.Tensor:
        """Feeds the tokens of a step.

        Args:
            token_ids: [num_tokens] int64, all real ids.
            layout: where they go.
            logit_tokens: [num_logits] indexes into token_ids.

        Returns:
            [num_logits, vocab_size] float32; on ranks other than 0 no rows.
        """
        ops = self._ops
        step = ops.prepare(layout)
        x = self.hidden(self._embed(token_ids[step.token_order]), step)
        if not len(logit_tokens):
            return torch.empty(0, self._config.vocab_size)
        place = np.empty_like(step.token_order)
        place[step.token_order] = np.arange(len(place))
        return self.logits(ops.take_rows(x, place[logit_tokens]))

    @property
    def embedding(self) -> torch.Tensor:
        """[vocabulary_rows, hidden_size], of the backend's dtype."""
        return self._weights.embedding

    def hidden(self, x: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        """Runs the layers over a step's embeddings; returns as many rows.

        Args:
            x: [num_tokens, hidden_size], rows of `embedding` in the step's token order; used up.
            step: where the tokens go.
        """
        ops, ranks, eps = self._ops, self._ranks, self._config.norm_eps
        if self._config.embedding_scale != 1:
            # Rounded like the embeddings, as transformers does. A tensor without an axis travels as a number.
            x = x * torch.tensor(self._config.embedding_scale, dtype=x.dtype)
        layers = self._weights.layers
        next_norms = [layer.attention_norm for layer in layers[1:]]
        normed = ops.rms_norm(x, layers[0].attention_norm, eps)
        for index, layer in enumerate(layers):
            qkv = ops.linear(normed, layer.qkv)
            if layer.query_norm is not None and layer.key_norm is not None:
                self._normalize_heads(qkv, layer.query_norm, layer.key_norm)
            attended = ranks.all_reduce(ops.linear(ops.attend(index, qkv, step), layer.output))
            attended = self._normed(attended, layer.post_attention_norm)
            normed = ops.add_rms_norm(x, attended, layer.mlp_norm, eps)
            answer = self._normed(ranks.all_reduce(self._mlp(normed, layer.mlp)), layer.post_mlp_norm)
            if index < len(next_norms):
                normed = ops.add_rms_norm(x, answer, next_norms[index], eps)
            else:
                x.add_(answer)
        return x

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [num_rows, vocab_size] float32 on rank 0, in `out` where it is given.

        Args:
            x: [num_rows, hidden_size], some rows of what `hidden` returned.
            out: [num_rows, vocab_size] float32 on rank 0; nothing is written on others, nor looked at.
        """
        normed = self._ops.rms_norm(x, self._weights.final_norm, self._config.norm_eps)
        narrow = self._ops.linear(normed, self._weights.head)
        logits = self._gathered(narrow, out)
        cap = self._config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids: NDArray[np.int64]) -> torch.Tensor:
        """Returns [num_tokens, hidden_size]: each token's embedding, from the rank that holds it."""
        table = self._weights.embedding
        if self._ranks.size == 1:
            return self._ops.take_rows(table, token_ids)
        rows = token_ids - self._ranks.rank * len(table)
        elsewhere = (rows < 0) | (rows >= len(table))
        x = self._ops.take_rows(table, np.where(elsewhere, 0, rows))
        x[as_tensor(elsewhere).to(x.device)] = 0
        return self._ranks.all_reduce(x)

    def _gathered(self, narrow: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Returns [num_rows, vocab_size] float32 from each rank's part, on rank 0, in `out` where it is given."""
        if self._ranks.size == 1:
            return narrow.float() if out is None else out.copy_(narrow)
        parts = self._ranks.gather(narrow)
        if out is None:
            rows = len(narrow) if parts else 0
            out = narrow.new_empty(rows, self._config.vocab_size, dtype=torch.float32)
        for rank, part in enumerate(parts):
            width = part.shape[1]
            columns = out[:, rank * width : (rank + 1) * width]
            columns.copy_(part[:, : columns.shape[1]])  # the last ids may be padding
        return out

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self._config.norm_eps)

    def _mlp(self, x: torch.Tensor, mlp: Mlp | Mixture) -> torch.Tensor:
        ops = self._ops
        if isinstance(mlp, Mixture):
            return apply_mixture(x, mlp, ops)
        gate_up = ops.linear(x, mlp.gate_up)
        return ops.linear(ops.gelu_tanh_mul(gate_up) if self._config.gelu else ops.silu_mul(gate_up), mlp.down)

    def _normalize_heads(self, qkv: torch.Tensor, query_norm: torch.Tensor, key_norm: torch.Tensor) -> None:
        """The norm of each query and key head (Qwen3, Gemma 3), in place."""
        config, eps = self._config, self._config.norm_eps
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        queries = heads[:, : config.num_heads]
        keys = heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
        queries.copy_(self._ops.rms_norm(queries, query_norm, eps))
        keys.copy_(self._ops.rms_norm(keys, key_norm, eps))
