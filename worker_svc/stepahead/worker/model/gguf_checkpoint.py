"""A model from GGUF files: its tensors under Hugging Face names, dequantised by the `gguf` package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray

from stepahead.worker.errors import ModelError
from stepahead.worker.model.family_source import FamilySource
from stepahead.worker.model.gguf_config import GgufMetadata
from stepahead.worker.model.gguf_parts import check_parts, model_name, part_files
from stepahead.worker.model.gguf_reader import read_gguf

_TYPES = gguf.GGMLQuantizationType
_FLOAT_TYPES = (_TYPES.F32, _TYPES.F16, _TYPES.BF16)
_QUANT_TYPES = (
    *(_TYPES.Q4_0, _TYPES.Q4_1, _TYPES.Q5_0, _TYPES.Q5_1, _TYPES.Q8_0),
    *(_TYPES.Q2_K, _TYPES.Q3_K, _TYPES.Q4_K, _TYPES.Q5_K, _TYPES.Q6_K),
)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN_NAMES = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""Where an architecture means something else by a name, or has names of its own."""
_HEAD_ORDERED = ("llama", "smollm3")
"""Architectures whose converter reorders the rows of q and k."""
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+\.weight)")
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufSource:
    """Tensors of GGUF files under their Hugging Face names; see `weights.WeightSource`."""

    def __init__(
        self, files: Mapping[Path, gguf.GGUFReader], architecture: str, heads_of: Mapping[str, int]
    ) -> None:
        """Takes the files and, for tensors stored in llama.cpp's head order, their number of heads by suffix."""
        names = {**_LAYER_NAMES, **_OWN_NAMES.get(architecture, {})}
        self._tensors = {
            hugging_face_name(tensor.name, names): tensor for reader in files.values() for tensor in reader.tensors
        }
        self._heads_of = heads_of
        self.total_bytes = sum(path.stat().st_size for path in files)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(int(n) for n in tensor.shape) for name, tensor in self._tensors.items()
        }
        """See `WeightSource.shapes`; the stored type is part of a quantised tensor's identity, its size too."""

    def read(self, name: str) -> tuple[torch.Tensor, int]:
        """See `WeightSource.read`. Experts, which the file holds as one tensor per layer, are read one by one."""
        tensor = self._tensors.get(name)
        expert = _EXPERT.fullmatch(name) if tensor is None else None
        if expert:
            tensor = self._tensors.get(f"{expert[1]}.{expert[3]}")
        if tensor is None:
            raise ModelError(f"the GGUF file has no tensor for {name}")
        kind = tensor.tensor_type
        if kind not in (*_FLOAT_TYPES, *_QUANT_TYPES):
            supported = ", ".join(t.name for t in (*_FLOAT_TYPES, *_QUANT_TYPES))
            raise ModelError(f"GGUF tensor {tensor.name} has type {kind.name}; supported are {supported}")
        # GGUF states shapes fastest axis first.
        shape, data, stored_bytes = (
            [int(size) for size in reversed(tensor.shape.tolist())],
            tensor.data,
            tensor.n_bytes,
        )
        if expert:
            index = int(expert[2])
            if len(shape) != 3 or index >= shape[0]:
                raise ModelError(f"GGUF tensor {tensor.name} of shape {shape} has no expert {index}")
            data, stored_bytes, shape = data[index], stored_bytes // shape[0], shape[1:]
        values = cast("NDArray[np.float32]", dequantize(data, kind)).astype(np.float32, copy=False).reshape(shape)
        num_heads = self._heads_of.get(name.split(".")[-2]) if "self_attn" in name else None
        if num_heads is not None:
            values = undo_head_order(values, num_heads)
        return torch.tensor(values), int(stored_bytes)


def undo_head_order(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Returns q or k rows in Hugging Face order: halves of a head apart, where llama.cpp interleaves them.

    Args:
        weight: [num_heads * head_dim, hidden] or [num_heads * head_dim] float32.
        num_heads: of this tensor.
    """
    head_dim = weight.shape[0] // num_heads
    split = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def hugging_face_name(name: str, layer_names: Mapping[str, str] = _LAYER_NAMES) -> str:
    """Returns the Hugging Face name of a GGUF tensor, or the name itself where there is none."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
    if len(parts) == 5 and f"{parts[2]}_exps" in layer_names:  # Mixtral's first files: a tensor per expert
        linear = layer_names[f"{parts[2]}_exps"].rpartition(".")[2]
        return f"model.layers.{parts[1]}.mlp.experts.{parts[3]}.{linear}.{parts[4]}"
    return name


class GgufCheckpoint:
    """One GGUF file, or the files of a split model; see `checkpoint.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Takes the model's only file or its first; the others lie beside it."""
        self.name = model_name(path)
        self.path = path
        files = {file: read_gguf(file) for file in part_files(path)}
        check_parts(list(files), list(files.values()))
        self.metadata = GgufMetadata(*files.values())
        self.config = self.metadata.config()
        ordered = self.metadata.architecture in _HEAD_ORDERED
        heads_of = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads} if ordered else {}
        source = GgufSource(files, self.metadata.architecture, heads_of)
        # Gemma's norm weights: the converter has added the 1.
        self.weights = FamilySource(source, self.config, add_one=False)

    @property
    def has_tokenizer(self) -> bool:
        """See `Checkpoint.has_tokenizer`."""
        return self.metadata.get("tokenizer.ggml.model") is not None

    def tokenizer_bundle(self) -> bytes:
        """See `Checkpoint.tokenizer_bundle`."""
        from stepahead.worker.model.tokenizer_bundle import bundle_from_gguf  # noqa: PLC0415 - slow import

        if not self.has_tokenizer:
            return b""
        return bundle_from_gguf(
            self.path,
            str(self.metadata.get("tokenizer.ggml.pre")),
            self.config,
            self.metadata.generation_defaults(),
        )

    def close(self) -> None:
        """See `Checkpoint.close`. The mapping ends with the last array that looks into it."""
