"""The configuration of a GGUF file, from its metadata as llama.cpp's converter writes it.

What the file does not say is what llama.cpp fills in for the architecture (`src/models/*.cpp` there).
"""

from __future__ import annotations

from typing import Any, cast

import gguf

from stepahead.kernels.reference.attention import LayerAttention
from stepahead.kernels.reference.rope import (
    DivisorScaling,
    LinearScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from stepahead.worker.errors import ModelError
from stepahead.worker.model.config import MixtureConfig, ModelConfig
from stepahead.worker.model.families import FAMILIES, LOCAL_THETA, NO_ROPE_INTERVAL, Family, Windows, family_of_gguf

_ROPE_DIVISORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models: the scale of their scores goes by hidden_size / num_heads, and no key says so."""
_SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}


class GgufMetadata:
    """Typed access to a file's metadata."""

    def __init__(self, reader: gguf.GGUFReader, *later: gguf.GGUFReader) -> None:
        """Takes the model's only file, or its first and the later ones, which hold tensors only."""
        self._tensors = {tensor.name: tensor for file in (reader, *later) for tensor in file.tensors}
        self._reader = reader
        self.architecture = str(self.get("general.architecture"))
        model_type = family_of_gguf(self.architecture)
        self.model_type = "mixtral" if model_type == "llama" and self._optional("expert_count") else model_type

    def get(self, key: str) -> Any:  # noqa: ANN401 - a GGUF value is a number, a string or a list of them
        """Returns a value, None where the key is absent."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def generation_defaults(self) -> dict[str, float | int]:
        """Returns the sampling defaults that the model's authors recommend, where the file holds them."""
        found = {name: self.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def config(self) -> ModelConfig:
        """Returns the configuration.

        Raises:
            ModelError: a key is missing or asks for something unsupported.
        """
        family = FAMILIES[self.model_type]
        num_heads, hidden_size = self._int("attention.head_count"), self._int("embedding_length")
        num_layers = self._int("block_count")
        head_dim = self._int("attention.key_length", hidden_size // num_heads)
        if self._int("attention.value_length", head_dim) != head_dim:
            raise ModelError(
                f"{self.architecture}.attention.value_length {self._int('attention.value_length')} is not "
                f"supported: head size {head_dim}"
            )
        rope = self._rope(head_dim)
        bos = self.get("tokenizer.ggml.bos_token_id")
        eos = (self.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self._vocab_size(),
            hidden_size=hidden_size,
            intermediate_size=self._int("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=self._int("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            norm_eps=float(self._value("attention.layer_norm_rms_epsilon")),
            rope=rope,
            attention_scale=self._score_dim(head_dim, hidden_size // num_heads, num_layers) ** -0.5,
            max_context_tokens=self._int("context_length"),
            tied_embeddings="output.weight" not in self._tensors,
            layers=self._layers(family, rope, num_layers),
            attention_cap=self._cap("attn_logit_softcapping", family),
            logit_cap=self._cap("final_logit_softcapping", family),
            embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
            gelu=family.gemma,
            offset_norms=family.gemma,
            post_norms=family.post_norms,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            mixture=self._mixture(num_layers),
            stored_dtype=self._stored_dtype(),
            bos_token_id=None if bos is None else int(bos),
            # dict keeps the order and drops an id named twice
            eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
        )

    def _optional(self, key: str) -> Any:  # noqa: ANN401 - as `get`
        return self.get(f"{self.architecture}.{key}")

    def _value(self, key: str) -> Any:  # noqa: ANN401 - as `get`
        value = self._optional(key)
        if value is None:
            raise ModelError(f"the GGUF file lacks {self.architecture}.{key}")
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._optional(key)
        if value is None and default is not None:
            return default
        value = self._value(key)
        if not isinstance(value, int):
            raise ModelError(f"{self.architecture}.{key} must be one integer for all layers, not {value!r}")
        return value

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._tensors:
            raise ModelError("the GGUF file has no tensor token_embd.weight")
        return int(self._tensors["token_embd.weight"].shape[1])

    def _stored_dtype(self) -> str:
        names = [name for name in ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight") if name in self._tensors]
        if not names:
            raise ModelError("the GGUF file has no tensor blk.0.attn_q.weight")
        kind = self._tensors[names[0]].tensor_type
        return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind.name, "quantized")

    def _score_dim(self, head_dim: int, hidden_per_head: int, num_layers: int) -> int:
        return hidden_per_head if _LARGEST_GEMMA.get(self.architecture) == num_layers else head_dim

    def _cap(self, key: str, family: Family) -> float | None:
        value = self._optional(key)
        if value is None:
            value = family.defaults.get(key)
        return float(value) if value else None

    def _mixture(self, num_layers: int) -> MixtureConfig | None:
        num_experts = self._optional("expert_count")
        if not num_experts:
            return None
        if self.model_type not in ("mixtral", "qwen3_moe"):
            raise ModelError(f"{self.architecture}.expert_count: supported are Mixtral and Qwen3-MoE")
        normalized = self._optional("expert_weights_norm")
        return MixtureConfig(
            num_experts=int(num_experts),
            experts_per_token=self._int("expert_used_count"),
            intermediate_size=self._int("expert_feed_forward_length", self._int("feed_forward_length")),
            normalized=True if normalized is None else bool(normalized),
            layers=tuple(f"blk.{layer}.ffn_gate_inp.weight" in self._tensors for layer in range(num_layers)),
        )

    def _layers(self, family: Family, rope: RopeConfig, num_layers: int) -> tuple[LayerAttention, ...]:
        """Returns in what layers differ, empty where they do not."""
        window = self._int("attention.sliding_window", int(self._default_window(family)))
        sliding = self._sliding(family, num_layers) if window else [False] * num_layers
        ropes: list[RopeConfig | None] = [rope] * num_layers
        if self.model_type == "gemma3_text":
            theta = self._optional("rope.freq_base_swa")
            local = RopeConfig(head_dim=rope.head_dim, theta=LOCAL_THETA if theta is None else float(theta))
            ropes = [local if slides else rope for slides in sliding]
        elif self.model_type == "smollm3":
            ropes = [rope if (layer + 1) % NO_ROPE_INTERVAL else None for layer in range(num_layers)]
        layers = tuple(
            LayerAttention(rope=turn, window=window if slides else None)
            for turn, slides in zip(ropes, sliding, strict=True)
        )
        return () if all(layer == LayerAttention(rope=rope) for layer in layers) else layers

    def _default_window(self, family: Family) -> int:
        """What llama.cpp takes where the file names no window: Gemma 2 has one, the others have none then."""
        return family.defaults["sliding_window"] if self.model_type == "gemma2" else 0

    def _sliding(self, family: Family, num_layers: int) -> list[bool]:
        stated = self._optional("attention.sliding_window_pattern")
        if isinstance(stated, list):
            flags = [bool(flag) for flag in cast("list[int]", stated)]
            if len(flags) < num_layers:
                raise ModelError(
                    f"attention.sliding_window_pattern has {len(flags)} entries for {num_layers} layers"
                )
            return flags[:num_layers]
        if family.windows is Windows.PATTERN:
            pattern = int(stated or family.pattern)
            return [bool((layer + 1) % pattern) for layer in range(num_layers)]
        # Mistral's files say llama; Qwen's name no window, and a window they named would not be in use.
        return [family.windows is Windows.ALL or self.model_type == "llama"] * num_layers

    def _rope(self, head_dim: int) -> RopeConfig:
        theta = self._optional("rope.freq_base")
        rotary_dim = self._int("rope.dimension_count", head_dim)
        if rotary_dim != head_dim and self.model_type != "phi3":
            raise ModelError(
                f"{self.architecture}.rope.dimension_count {rotary_dim} is not supported: head size {head_dim}"
            )
        return RopeConfig(
            head_dim=head_dim,
            theta=10_000.0 if theta is None else float(theta),
            scaling=self._rope_scaling(self._int("context_length")),
            rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        )

    def _rope_scaling(self, context: int) -> RopeScaling | None:
        if _ROPE_DIVISORS in self._tensors:
            return DivisorScaling(divisors=self._numbers(_ROPE_DIVISORS))
        if _LONG_FACTORS in self._tensors and _SHORT_FACTORS in self._tensors:
            factor = self._optional("rope.scaling.attn_factor")
            return LongRopeScaling(
                short=self._numbers(_SHORT_FACTORS),
                long=self._numbers(_LONG_FACTORS),
                original_context_tokens=self._int("rope.scaling.original_context_length", context),
                attention_factor=1.0 if factor is None else float(factor),
            )
        kind = self._optional("rope.scaling.type")
        if kind in (None, "none"):
            return None
        factor = float(self._value("rope.scaling.factor"))
        if kind == "linear":
            return LinearScaling(factor=factor)
        if kind == "yarn":
            original = self._int("rope.scaling.original_context_length", context)
            return YarnScaling(factor=factor, original_context_tokens=original)
        raise ModelError(
            f"rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn, and factors in tensors"
        )

    def _numbers(self, name: str) -> tuple[float, ...]:
        return tuple(self._tensors[name].data.astype(float).tolist())
