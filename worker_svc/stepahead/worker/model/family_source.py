"""A checkpoint's tensors under one set of names, one linear each, whatever its family calls and fuses.

model.embed_tokens, model.norm, lm_head                             .weight
model.layers.N.input_layernorm, post_attention_layernorm            .weight, and with post norms
               pre_feedforward_layernorm, post_feedforward_layernorm
model.layers.N.self_attn.{q,k,v,o}_proj                             .weight and .bias, {q,k}_norm.weight
model.layers.N.mlp.{gate,up,down}_proj                              .weight and .bias, or with experts
model.layers.N.mlp.gate.weight, mlp.experts.E.{gate,up,down}_proj.weight
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from stepahead.kernels.reference.rope import rotary_order
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.weights import WeightSource

_PREFIXES = ("language_model.", "model.language_model.")
"""What stands before a language model's names beside a vision tower, in old and new checkpoints."""
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_EXPERT = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight")


class FamilySource:
    """Implements `WeightSource` over another one."""

    def __init__(self, source: WeightSource, config: ModelConfig, *, add_one: bool) -> None:
        """Takes the source, and whether norm weights are stored without the 1 that belongs to them."""
        self._source = source
        self._config = config
        self._add_one = add_one
        self._fused: tuple[str, torch.Tensor, int] | None = None

    @property
    def total_bytes(self) -> int:
        """See `WeightSource.total_bytes`."""
        return self._source.total_bytes

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource.shapes`: the tensors as they are stored."""
        return self._source.shapes

    def read(self, name: str) -> tuple[torch.Tensor, int]:
        """See `WeightSource.read`."""
        fused, part = self._fused_name(name)
        if fused is not None:
            tensor, stored_bytes = self._read_part(fused, part)
        else:
            tensor, stored_bytes = self._source.read(self._stored_name(name))
        if self._add_one and name.endswith("norm.weight"):
            # in float32: rounding 1 + w to bfloat16 would lose most of w
            tensor = tensor.float() + 1.0
        if self._config.rope.rotary_dim is not None and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = self._halves_apart(tensor)
        return tensor, stored_bytes

    def _stored_name(self, name: str) -> str:
        """Returns the checkpoint's name for one of ours, or ours where it has none: the error then names it."""
        shapes = self._source.shapes
        if name in shapes:
            return name
        names = [prefix + name for prefix in _PREFIXES]
        names.append(name.replace("model.", _PREFIXES[1], 1))
        names.append(name.replace(".mlp.gate.", ".block_sparse_moe.gate."))
        if expert := _EXPERT.fullmatch(name):
            layer, index, linear = expert.groups()
            names.append(f"{layer}.block_sparse_moe.experts.{index}.{_MIXTRAL[linear]}.weight")
        return next((candidate for candidate in names if candidate in shapes), name)

    def _fused_name(self, name: str) -> tuple[str | None, slice]:
        """Returns the fused tensor (Phi-3) a linear is part of and its rows, or None."""
        config = self._config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        parts = {
            "self_attn.q_proj": ("self_attn.qkv_proj", slice(0, queries)),
            "self_attn.k_proj": ("self_attn.qkv_proj", slice(queries, queries + keys)),
            "self_attn.v_proj": ("self_attn.qkv_proj", slice(queries + keys, queries + 2 * keys)),
            "mlp.gate_proj": ("mlp.gate_up_proj", slice(0, inner)),
            "mlp.up_proj": ("mlp.gate_up_proj", slice(inner, 2 * inner)),
        }
        linear = ".".join(name.split(".")[3:5])
        if linear in parts:
            fused = name.replace(linear, parts[linear][0])
            if fused in self._source.shapes:
                return fused, parts[linear][1]
        return None, slice(0)

    def _read_part(self, fused: str, rows: slice) -> tuple[torch.Tensor, int]:
        """Returns rows of a fused tensor, which is read, and perhaps dequantised, once for all its parts."""
        if self._fused is None or self._fused[0] != fused:
            self._fused = (fused, *self._source.read(fused))
        _, tensor, stored_bytes = self._fused
        part = tensor[rows]
        return part, stored_bytes * part.shape[0] // tensor.shape[0]

    def _halves_apart(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the rows of queries or keys in the order of `rope.rotary_order`."""
        config = self._config
        heads = weight.view(-1, config.head_dim, weight.shape[-1])
        return heads[:, torch.tensor(rotary_order(config.rope))].reshape(weight.shape)
