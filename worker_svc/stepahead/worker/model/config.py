"""What a decoder must know of a model, read from a Hugging Face `config.json`.

One parametric decoder serves the Llama family. Whatever a configuration asks for beyond it is refused by name:
a model that loads and then computes something else is the worst outcome.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stepahead.kernels.reference.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from stepahead.worker.errors import ModelError

SUPPORTED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")

_DEFAULT_THETA = {"qwen3": 1_000_000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder in numbers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_context_tokens: int
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    stored_dtype: str = "bfloat16"
    """How the checkpoint stores weights, as far as it says: "float32", "float16", "bfloat16" or "quantized"."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def read_config(directory: Path) -> ModelConfig:
    """Reads `config.json` (and the end-of-sequence ids of `generation_config.json`) of a model directory.

    Raises:
        ModelError: there is no readable configuration, or it asks for something unsupported.
    """
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    return parse_config(config, read_json(generation) if generation.exists() else {})


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: the file is missing or holds something else.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing in {path.parent}; a model directory needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return cast("dict[str, Any]", content)


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Turns the two JSON objects into a `ModelConfig`.

    Raises:
        ModelError: a field is missing or asks for something unsupported.
    """
    model_type = str(config.get("model_type"))
    _refuse_unsupported(config, model_type)
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} must be even for rotary embedding")
    attention_bias = bool(config.get("attention_bias", False))
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    bos = config.get("bos_token_id", generation.get("bos_token_id"))
    return ModelConfig(
        model_type=model_type,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=RopeConfig(
            head_dim=head_dim, theta=_theta(config, model_type), scaling=_rope_scaling(config, model_type)
        ),
        max_context_tokens=_context(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        # Qwen2 has biases on q, k and v without saying so; Llama and Qwen3 say so and mean the output as well.
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias and model_type in ("llama", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        bos_token_id=_token_ids(bos)[0] if _token_ids(bos) else None,
        eos_token_ids=_token_ids(eos),
    )


def _refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    if model_type not in SUPPORTED_TYPES:
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED_TYPES)} "
            f"(Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3) and the toy models"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} is not supported; supported is silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"quantization_config (quant_method {method!r}) is not supported; supported are float32, float16 and "
            f"bfloat16 safetensors, and GGUF files"
        )


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    """Returns the ids of a field that holds an id, a list of them, or nothing."""
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(int(entry) for entry in cast("list[int]", value))
    return ()


def _context(config: Mapping[str, Any]) -> int:
    context = _positive(config, "max_position_embeddings")
    window = config.get("sliding_window")
    # Inside its window a windowed model is an ordinary one, so the window bounds the context instead of the model
    # being refused. Qwen2 names a window and switches it off.
    if isinstance(window, int) and config.get("use_sliding_window", True):
        return min(context, window)
    return context


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_parameters` (transformers 5) or `rope_scaling` (before); both mean the same."""
    fields: object = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, dict):
        raise ModelError("config.json: rope_parameters must be an object")
    return cast("dict[str, Any]", fields)


def _theta(config: Mapping[str, Any], model_type: str) -> float:
    theta = _rope_fields(config).get("rope_theta", config.get("rope_theta"))
    return float(theta if theta is not None else _DEFAULT_THETA.get(model_type, 10_000.0))


def _rope_scaling(config: Mapping[str, Any], model_type: str) -> RopeScaling | None:
    fields = _rope_fields(config)
    kind = str(fields.get("rope_type", fields.get("type", "default")))
    partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} of {model_type} is not supported; supported is 1")
    original = int(fields.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0)
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(factor=float(fields["factor"]))
            case "llama3":
                return Llama3Scaling(
                    factor=float(fields["factor"]),
                    low_freq_factor=float(fields["low_freq_factor"]),
                    high_freq_factor=float(fields["high_freq_factor"]),
                    original_context_tokens=original,
                )
            case "yarn":
                return _yarn_scaling(fields, original)
            case _:
                raise ModelError(f"rope_type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE)}")
    except KeyError as error:
        raise ModelError(f"config.json: rope_type {kind!r} needs the field {error.args[0]}") from error


def _yarn_scaling(fields: Mapping[str, Any], original: int) -> YarnScaling:
    if fields.get("mscale") or fields.get("mscale_all_dim"):
        raise ModelError("rope_type 'yarn' with mscale is not supported; supported is attention_factor")
    attention_factor = fields.get("attention_factor")
    return YarnScaling(
        factor=float(fields["factor"]),
        original_context_tokens=original,
        attention_factor=None if attention_factor is None else float(attention_factor),
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        truncate=bool(fields.get("truncate", True)),
    )
