"""What a decoder must know of a model, read from a Hugging Face `config.json`.

One parametric decoder serves the families of `families`. Whatever a configuration asks for beyond them is refused
by name: a model that loads and then computes something else is the worst outcome.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stepahead.kernels.reference.attention import LayerAttention
from stepahead.kernels.reference.rope import RopeConfig
from stepahead.worker.errors import ModelError
from stepahead.worker.model.families import LOCAL_THETA, Family, Windows, family_of
from stepahead.worker.model.rope_fields import parse_local_rope, parse_rope

_SILU = ("silu", "swish")
_GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """A mixture of experts in place of the MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalized: bool
    """Whether the weights of a token's experts are scaled to sum 1."""
    layers: tuple[bool, ...]
    """Which layers have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder in numbers."""

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
    attention_scale: float
    max_context_tokens: int
    tied_embeddings: bool
    layers: tuple[LayerAttention, ...] = ()
    """In what layers differ, or empty: all turn by `rope` and see all."""
    attention_cap: float | None = None
    logit_cap: float | None = None
    """Bounds, see `kernels.reference.elementwise.softcap`."""
    embedding_scale: float = 1.0
    gelu: bool = False
    """The MLP's activation is gelu in its tanh form instead of silu."""
    offset_norms: bool = False
    """Norm weights are 1 + w, multiplied in float32 whatever the dtype. Sources give the sum."""
    post_norms: bool = False
    """Attention's and the MLP's results are normalised before they join the residual."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mixture: MixtureConfig | None = None
    stored_dtype: str = "bfloat16"
    """How the checkpoint stores weights, as far as it says: "float32", "float16", "bfloat16" or "quantized"."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """What checkpoints call a layer's norms beside `input_layernorm`; None where there is none."""

    before_mlp: str
    after_attention: str | None
    after_mlp: str | None


def layer_norms(config: ModelConfig) -> LayerNorms:
    """Returns the names: with post norms, `post_attention_layernorm` is what it says; without, the MLP's."""
    if config.post_norms:
        return LayerNorms("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    return LayerNorms("post_attention_layernorm", None, None)


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
    config = _text_part(config)
    family = family_of(str(config.get("model_type")))
    config = {**family.defaults, **config}
    _refuse_unsupported(config, family)
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    num_layers = _positive(config, "num_hidden_layers")
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} must be even for rotary embedding")
    attention_bias = bool(config.get("attention_bias", False))
    rope = parse_rope(config, head_dim, family.theta)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    bos = config.get("bos_token_id", generation.get("bos_token_id"))
    return ModelConfig(
        model_type=str(config["model_type"]),
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        attention_scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        max_context_tokens=_positive(config, "max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        layers=_layers(config, family, rope, num_layers),
        attention_cap=_optional_float(config, "attn_logit_softcapping"),
        logit_cap=_optional_float(config, "final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        gelu=family.gemma,
        offset_norms=family.gemma,
        post_norms=family.post_norms,
        qkv_bias=attention_bias or family.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        mixture=_mixture(config, num_layers),
        stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        bos_token_id=_token_ids(bos)[0] if _token_ids(bos) else None,
        eos_token_ids=_token_ids(eos),
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model of a configuration that also has a vision tower (Gemma 3)."""
    if config.get("model_type") != "gemma3":
        return config
    text: object = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError("config.json: gemma3 needs the object text_config")
    around = {name: value for name, value in config.items() if not name.endswith("_config")}
    return {**around, **cast("dict[str, Any]", text), "model_type": "gemma3_text"}


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    model_type = config["model_type"]
    activation = (
        config.get("hidden_activation") or config.get("hidden_act") or (_GELU_TANH if family.gemma else "silu")
    )
    supported = (_GELU_TANH,) if family.gemma else _SILU
    if model_type == "gemma":
        supported = (_GELU_TANH, "gelu")  # its first configurations said gelu and meant the tanh form
    if activation not in supported:
        raise ModelError(f"hidden_act {activation!r} of {model_type} is not supported; supported is {supported[0]}")
    if config.get("attention_bias") and not family.bias_option:
        raise ModelError(f"attention_bias of {model_type} is not supported")
    if config.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not supported; supported is causal attention")
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


def _optional_float(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    return None if value is None else float(value)


def _layers(
    config: Mapping[str, Any], family: Family, rope: RopeConfig, num_layers: int
) -> tuple[LayerAttention, ...]:
    """Returns in what layers differ, empty where they do not."""
    windows = _windows(config, family, num_layers)
    ropes: list[RopeConfig | None] = [rope] * num_layers
    if config["model_type"] == "gemma3_text":
        local = parse_local_rope(config, rope.head_dim, LOCAL_THETA)
        # The base goes by the kind of layer, whether the window is in use or not.
        ropes = [local if sliding else rope for sliding in _sliding(config, family, num_layers)]
    elif config["model_type"] == "smollm3":
        ropes = [rope if turns else None for turns in _turning(config, num_layers)]
    layers = tuple(LayerAttention(rope=rope, window=window) for rope, window in zip(ropes, windows, strict=True))
    return () if all(layer == LayerAttention(rope=rope) for layer in layers) else layers


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> list[int | None]:
    sliding = _sliding(config, family, num_layers)
    if config.get("sliding_window") is None or not any(sliding):
        return [None] * num_layers
    window = _positive(config, "sliding_window")
    return [window if slides else None for slides in sliding]


def _sliding(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Returns which layers see only a window, if there is one."""
    used = bool(config.get("use_sliding_window", False))
    match family.windows:
        case Windows.NONE:
            return [False] * num_layers
        case Windows.ALL:
            return [True] * num_layers
        case Windows.ALL_IF_USED:
            return [used] * num_layers
        case Windows.UPPER:
            computed = [layer >= int(config["max_window_layers"]) for layer in range(num_layers)]
        case Windows.NO_ROPE:
            computed = [not turns for turns in _turning(config, num_layers)]
        case Windows.PATTERN:
            used = True
            stated = config.get("sliding_window_pattern") is not None
            pattern = _positive(config, "sliding_window_pattern") if stated else family.pattern
            computed = [bool((layer + 1) % pattern) for layer in range(num_layers)]
    kinds = cast("list[str] | None", config.get("layer_types"))
    if kinds is not None:
        computed = [kind == "sliding_attention" for kind in kinds]
    if len(computed) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(computed)} entries for {num_layers} layers")
    return [used and sliding for sliding in computed]


def _turning(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns which layers of a SmolLM3 turn."""
    stated = cast("list[int] | None", config.get("no_rope_layers"))  # a 1 means: turns
    if stated is None:
        interval = _positive(config, "no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(stated) < num_layers:
        raise ModelError(f"config.json: no_rope_layers has {len(stated)} entries for {num_layers} layers")
    return [bool(turns) for turns in stated[:num_layers]]


def _mixture(config: Mapping[str, Any], num_layers: int) -> MixtureConfig | None:
    if config["model_type"] == "mixtral":
        return MixtureConfig(
            num_experts=_positive(config, "num_local_experts"),
            experts_per_token=_positive(config, "num_experts_per_tok"),
            intermediate_size=_positive(config, "intermediate_size"),
            normalized=True,
            layers=(True,) * num_layers,
        )
    if config["model_type"] != "qwen3_moe":
        return None
    dense = cast("list[int]", config.get("mlp_only_layers") or [])
    step = int(config.get("decoder_sparse_step") or 1)
    # transformers 5 also calls it num_local_experts, as Mixtral does
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return MixtureConfig(
        num_experts=_positive(config, experts),
        experts_per_token=_positive(config, "num_experts_per_tok"),
        intermediate_size=_positive(config, "moe_intermediate_size"),
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
