"""A model from one GGUF file: configuration from its metadata, weights dequantised by the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray
from typing_extensions import override

from stepahead.kernels.reference.rope import (
    DivisorScaling,
    LinearScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from stepahead.worker.errors import ModelError
from stepahead.worker.model.config import ModelConfig

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")

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
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class PlainReader(gguf.GGUFReader):
    """The package's reader over a plain array: its million slices of a `memmap` cost three times more."""

    @override
    def __setattr__(self, name: str, value: object) -> None:
        """Stores the file's mapping as a view without the subclass."""
        object.__setattr__(self, name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)


class GgufSource:
    """Tensors of a GGUF file under their Hugging Face names; see `weights.WeightSource`."""

    def __init__(self, reader: gguf.GGUFReader, path: Path, heads_of: Mapping[str, int]) -> None:
        """Takes the reader and, for tensors stored in llama.cpp's head order, their number of heads by suffix."""
        self._tensors = {hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
        self._heads_of = heads_of
        self.total_bytes = path.stat().st_size

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource.shapes`; the stored type is part of a quantised tensor's identity, its size too."""
        return {name: tuple(int(n) for n in tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> tuple[torch.Tensor, int]:
        """See `WeightSource.read`."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"the GGUF file has no tensor for {name}")
        kind = tensor.tensor_type
        if kind not in (*_FLOAT_TYPES, *_QUANT_TYPES):
            supported = ", ".join(t.name for t in (*_FLOAT_TYPES, *_QUANT_TYPES))
            raise ModelError(f"GGUF tensor {tensor.name} has type {kind.name}; supported are {supported}")
        values = cast("NDArray[np.float32]", dequantize(tensor.data, kind)).astype(np.float32, copy=False)
        # GGUF states shapes fastest axis first.
        values = values.reshape([int(size) for size in reversed(tensor.shape.tolist())])
        num_heads = self._heads_of.get(name.split(".")[-2]) if "self_attn" in name else None
        if num_heads is not None:
            values = undo_head_order(values, num_heads)
        return torch.tensor(values), int(tensor.n_bytes)


def undo_head_order(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Returns q or k rows in Hugging Face order: halves of a head apart, where llama.cpp interleaves them.

    Args:
        weight: [num_heads * head_dim, hidden] or [num_heads * head_dim] float32.
        num_heads: of this tensor.
    """
    head_dim = weight.shape[0] // num_heads
    split = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def hugging_face_name(name: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor, or the name itself where there is none."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


class GgufCheckpoint:
    """One GGUF file; see `checkpoint.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._path = path
        try:
            self._reader = PlainReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ModelError(f"{path} cannot be read as GGUF: {error}") from error
        self.metadata = GgufMetadata(self._reader)
        self.config = self.metadata.config()
        # Only llama's converter reorders the rows of q and k.
        ordered = self.metadata.architecture == "llama"
        heads_of = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads} if ordered else {}
        self.weights = GgufSource(self._reader, path, heads_of)

    def tokenizer_bundle(self) -> bytes:
        """See `Checkpoint.tokenizer_bundle`."""
        from stepahead.worker.model.tokenizer_bundle import bundle_from_gguf  # noqa: PLC0415 - slow import

        if self.metadata.get("tokenizer.ggml.model") is None:
            return b""
        return bundle_from_gguf(self._path, str(self.metadata.get("tokenizer.ggml.pre")), self.config)

    def close(self) -> None:
        """See `Checkpoint.close`. The mapping ends with the last array that looks into it."""


class GgufMetadata:
    """Typed access to a file's metadata."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader
        self._tensor_names = {tensor.name for tensor in reader.tensors}
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelError(
                f"general.architecture {self.architecture!r} is not supported; supported are "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}"
            )

    def get(self, key: str) -> Any:  # noqa: ANN401 - a GGUF value is a number, a string or a list of them
        """Returns a value, None where the key is absent."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def config(self) -> ModelConfig:
        """Returns the configuration.

        Raises:
            ModelError: a key is missing or asks for something unsupported.
        """
        num_heads = self._int("attention.head_count")
        hidden_size = self._int("embedding_length")
        head_dim = self._int("attention.key_length", hidden_size // num_heads)
        for key, wanted in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
            if self._int(key, wanted) != wanted:
                raise ModelError(
                    f"{self.architecture}.{key} {self._int(key)} is not supported: head size {head_dim}"
                )
        if self.get(f"{self.architecture}.expert_count"):
            raise ModelError(f"{self.architecture}.expert_count: mixtures of experts are not supported")
        context = self._int("context_length")
        window = self.get(f"{self.architecture}.attention.sliding_window")
        bos = self.get("tokenizer.ggml.bos_token_id")
        eos = (self.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return ModelConfig(
            model_type=self.architecture,
            vocab_size=self._vocab_size(),
            hidden_size=hidden_size,
            intermediate_size=self._int("feed_forward_length"),
            num_layers=self._int("block_count"),
            num_heads=num_heads,
            num_kv_heads=self._int("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            norm_eps=float(self._value("attention.layer_norm_rms_epsilon")),
            rope=RopeConfig(head_dim=head_dim, theta=self._theta(), scaling=self._rope_scaling(context)),
            max_context_tokens=min(context, int(window)) if window else context,
            tied_embeddings="output.weight" not in self._tensor_names,
            qkv_bias="blk.0.attn_q.bias" in self._tensor_names,
            output_bias="blk.0.attn_output.bias" in self._tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensor_names,
            stored_dtype=self._stored_dtype(),
            bos_token_id=None if bos is None else int(bos),
            # dict keeps the order and drops an id named twice
            eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
        )

    def _value(self, key: str) -> Any:  # noqa: ANN401 - as `get`
        value = self.get(f"{self.architecture}.{key}")
        if value is None:
            raise ModelError(f"the GGUF file lacks {self.architecture}.{key}")
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        value = self.get(f"{self.architecture}.{key}")
        if value is None and default is not None:
            return default
        value = self._value(key)
        if not isinstance(value, int):
            raise ModelError(f"{self.architecture}.{key} must be one integer for all layers, not {value!r}")
        return value

    def _theta(self) -> float:
        theta = self.get(f"{self.architecture}.rope.freq_base")
        return 10_000.0 if theta is None else float(theta)

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        return next(tensor for tensor in self._reader.tensors if tensor.name == name)

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._tensor_names:
            raise ModelError("the GGUF file has no tensor token_embd.weight")
        return int(self._tensor("token_embd.weight").shape[1])

    def _stored_dtype(self) -> str:
        kind = self._tensor("blk.0.attn_q.weight").tensor_type
        return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind.name, "quantized")

    def _rope_scaling(self, context: int) -> RopeScaling | None:
        if _ROPE_DIVISORS in self._tensor_names:
            return DivisorScaling(divisors=tuple(self._tensor(_ROPE_DIVISORS).data.astype(float).tolist()))
        kind = self.get(f"{self.architecture}.rope.scaling.type")
        if kind in (None, "none"):
            return None
        factor = float(self._value("rope.scaling.factor"))
        if kind == "linear":
            return LinearScaling(factor=factor)
        if kind == "yarn":
            original = self._int("rope.scaling.original_context_length", context)
            return YarnScaling(factor=factor, original_context_tokens=original)
        raise ModelError(f"rope.scaling.type {kind!r} is not supported; supported are none, linear and yarn")
