"""Models of random weights: what a size costs can be measured without downloading anything.

`random:llama-8b` has the shape of Llama 3 8B. Its texts mean nothing; its steps cost what the real ones cost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.model.config import ModelConfig, parse_config

PREFIX = "random:"

SHAPES: dict[str, dict[str, object]] = {
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "llama-tiny": {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
}
"""Llamas, as `config.json` would state them."""

_POOL_SIZE = 1 << 24  # values drawn; larger tensors repeat them


class RandomWeights:
    """A `WeightSource` of normal values: of scale 1 / sqrt(inputs), so that activations stay about as large.

    Args:
        config: of the model; a llama without biases.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = _llama_shapes(config)
        self._dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.stored_dtype]
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.randn(_POOL_SIZE, generator=generator).to(self._dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(_size, self.shapes.values())) * self._dtype.itemsize

    def read(self, name: str) -> tuple[torch.Tensor, int]:
        """See `WeightSource.read`."""
        shape = self.shapes.get(name)
        if shape is None:
            raise ModelError(f"there is no tensor {name}")
        size = _size(shape)
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype), size * self._dtype.itemsize
        # Tensors begin at places of their own: equal layers would hide a mix-up.
        first = sum(name.encode()) * 977 % (_POOL_SIZE // 2)
        part = self._pool[first:] / shape[1] ** 0.5
        values = part.repeat(-(-size // len(part)))[:size].view(shape)
        return values, size * self._dtype.itemsize


class RandomCheckpoint:
    """A `Checkpoint` of random weights.

    Args:
        spec: `random:` and a name of `SHAPES`.

    Raises:
        OptionRefused: there is no such shape.
    """

    def __init__(self, spec: str) -> None:
        fields = SHAPES.get(spec.removeprefix(PREFIX))
        if fields is None:
            raise OptionRefused(f"--model {spec}: there are {', '.join(PREFIX + name for name in SHAPES)}")
        self.name = spec
        self.config = parse_config(fields, {})
        self.weights = RandomWeights(self.config)

    @property
    def path(self) -> Path:
        """See `Checkpoint.path`: nothing on disk."""
        return Path(os.devnull)

    @property
    def has_tokenizer(self) -> bool:
        """See `Checkpoint.has_tokenizer`."""
        return False

    def tokenizer_bundle(self) -> bytes:
        """See `Checkpoint.tokenizer_bundle`: it has none."""
        return b""

    def close(self) -> None:
        """See `Checkpoint.close`."""


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _llama_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (queries, hidden),
            layer + "self_attn.k_proj.weight": (keys, hidden),
            layer + "self_attn.v_proj.weight": (keys, hidden),
            layer + "self_attn.o_proj.weight": (hidden, queries),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes
