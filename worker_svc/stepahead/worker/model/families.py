"""The model families that the parametric decoder computes, and what each means without saying so.

A configuration states sizes; whether an activation is silu or a norm's weight is 1 + w is a matter of its family.
The facts here are those of `transformers` 5 (`models/*/configuration_*.py` and `modeling_*.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from stepahead.worker.errors import ModelError


class Windows(Enum):
    """Which layers of a family see only a window of keys, where its configuration names one."""

    NONE = "none"
    ALL = "all"
    UPPER = "upper"
    """Those from `max_window_layers` on, if `use_sliding_window`."""
    ALL_IF_USED = "all if used"
    """All, if `use_sliding_window`."""
    PATTERN = "pattern"
    """All but each n-th."""
    NO_ROPE = "no rope"
    """Those that do not turn, if `use_sliding_window`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a `model_type` stands for."""

    title: str
    architectures: tuple[str, ...]
    """What GGUF files call it in `general.architecture`."""
    windows: Windows = Windows.NONE
    pattern: int = 0
    """For `Windows.PATTERN`: each n-th layer sees all, unless the configuration says otherwise."""
    qkv_bias: bool = False
    """Always biases on q, k and v."""
    bias_option: bool = False
    """`attention_bias` means biases on q, k, v and the output."""
    qk_norm: bool = False
    gemma: bool = False
    """Embeddings times sqrt(hidden_size), norm weights 1 + w, gelu in its tanh form."""
    post_norms: bool = False
    """A norm after attention and after the MLP, before the result joins the residual."""
    theta: float = 10_000.0
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields that published configurations leave out, as `transformers` fills them in."""


_TIED = {"tie_word_embeddings": True}
_GEMMA = {**_TIED, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(title="Llama 2 and 3, SmolLM2", architectures=("llama",), bias_option=True),
    "mistral": Family(
        title="Mistral", architectures=("llama",), windows=Windows.ALL, defaults={"sliding_window": 4096}
    ),
    "mixtral": Family(
        title="Mixtral",
        architectures=("llama",),
        windows=Windows.ALL,
        theta=1_000_000.0,
        defaults={"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2": Family(
        title="Qwen2 and 2.5",
        architectures=("qwen2",),
        windows=Windows.UPPER,
        qkv_bias=True,
        defaults={"sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Family(
        title="Qwen3",
        architectures=("qwen3",),
        windows=Windows.UPPER,
        bias_option=True,
        qk_norm=True,
        defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        architectures=("qwen3moe",),
        windows=Windows.ALL_IF_USED,
        bias_option=True,
        qk_norm=True,
        defaults={
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "smollm3": Family(
        title="SmolLM3",
        architectures=("smollm3",),
        windows=Windows.NO_ROPE,
        bias_option=True,
        theta=2_000_000.0,
        defaults={**_TIED, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
    ),
    "gemma": Family(
        title="Gemma",
        architectures=("gemma",),
        bias_option=True,
        gemma=True,
        defaults=_GEMMA,
    ),
    "gemma2": Family(
        title="Gemma 2",
        architectures=("gemma2",),
        windows=Windows.PATTERN,
        pattern=2,
        bias_option=True,
        gemma=True,
        post_norms=True,
        defaults={
            **_GEMMA,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
    ),
    "gemma3_text": Family(
        title="Gemma 3",
        architectures=("gemma3",),
        windows=Windows.PATTERN,
        pattern=6,
        bias_option=True,
        qk_norm=True,
        gemma=True,
        post_norms=True,
        theta=1_000_000.0,
        defaults={
            **_GEMMA,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    ),
    "phi3": Family(
        title="Phi-3 and 4",
        architectures=("phi3",),
        windows=Windows.ALL,
        defaults={"rms_norm_eps": 1e-5},
    ),
}
LOCAL_THETA = 10_000.0
"""Base of Gemma 3's windowed layers where nothing else is said."""
NO_ROPE_INTERVAL = 4
"""Each such layer of SmolLM3 does not turn, where nothing else is said."""


def family_of(model_type: str) -> Family:
    """Returns a family.

    Raises:
        ModelError: the decoder does not compute this one.
    """
    if model_type not in FAMILIES:
        titles = ", ".join(family.title for family in FAMILIES.values())
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)} and the text part of "
            f"gemma3 ({titles}), and the toy models"
        )
    return FAMILIES[model_type]


def architectures() -> tuple[str, ...]:
    """Returns what GGUF files may state as their architecture."""
    return tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.architectures))


def family_of_gguf(architecture: str) -> str:
    """Returns the model type of a GGUF architecture: the first with that name.

    Raises:
        ModelError: the decoder does not compute this one.
    """
    for model_type, family in FAMILIES.items():
        if architecture in family.architectures:
            return model_type
    raise ModelError(
        f"general.architecture {architecture!r} is not supported; supported are {', '.join(architectures())}"
    )
