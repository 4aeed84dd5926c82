"""Rotary embedding as a Hugging Face configuration states it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from stepahead.kernels.reference.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from stepahead.worker.errors import ModelError

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
_LAYER_KINDS = ("full_attention", "sliding_attention")


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_parameters` (transformers 5) or `rope_scaling` (before); both mean the same.

    Raises:
        ModelError: it is no object.
    """
    fields: object = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, dict):
        raise ModelError("config.json: rope_parameters must be an object")
    return cast("dict[str, Any]", fields)


def parse_rope(config: Mapping[str, Any], head_dim: int, default_theta: float) -> RopeConfig:
    """Returns what a configuration turns queries and keys by; of several sets, that of the layers that see all.

    Raises:
        ModelError: it asks for something unsupported, or a field is missing.
    """
    fields = rope_fields(config)
    if any(kind in fields for kind in _LAYER_KINDS):
        fields = cast("dict[str, Any]", fields.get("full_attention") or {})
    theta = fields.get("rope_theta", config.get("rope_theta"))
    return RopeConfig(
        head_dim=head_dim,
        theta=float(theta if theta is not None else default_theta),
        scaling=_scaling(config, fields),
        rotary_dim=_rotary_dim(config, fields, head_dim),
    )


def parse_local_rope(config: Mapping[str, Any], head_dim: int, default_theta: float) -> RopeConfig:
    """Returns what Gemma 3's windowed layers turn by: a base of their own, and no scaling unless it is stated."""
    fields = cast("dict[str, Any]", rope_fields(config).get("sliding_attention") or {})
    theta = fields.get("rope_theta", config.get("rope_local_base_freq"))
    return RopeConfig(
        head_dim=head_dim,
        theta=float(theta if theta is not None else default_theta),
        scaling=_scaling(config, fields),
    )


def longrope_attention_factor(factor: float, original: int) -> float:
    """Returns LongRoPE's factor on the tables, sqrt(1 + ln(factor) / ln(original)) (Ding et al. 2024)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _rotary_dim(config: Mapping[str, Any], fields: Mapping[str, Any], head_dim: int) -> int | None:
    partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial in (None, 1, 1.0):
        return None
    if config.get("model_type") != "phi3":
        raise ModelError(
            f"partial_rotary_factor {partial} of {config.get('model_type')} is not supported; supported is 1, and "
            f"any of phi3"
        )
    rotary_dim = int(head_dim * float(partial))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(
            f"partial_rotary_factor {partial}: {rotary_dim} of {head_dim} elements must be an even part"
        )
    return rotary_dim


def _scaling(config: Mapping[str, Any], fields: Mapping[str, Any]) -> RopeScaling | None:
    kind = str(fields.get("rope_type", fields.get("type", "default")))
    if config.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # what Phi-3's first configurations called it
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
            case "longrope":
                return _longrope_scaling(config, fields)
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


def _longrope_scaling(config: Mapping[str, Any], fields: Mapping[str, Any]) -> LongRopeScaling:
    context = int(config.get("max_position_embeddings") or 0)
    # Phi-3 states the trained context beside the other sizes, and that goes before one among the rope's fields.
    stated = config.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    original = int(stated or context)
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        factor = fields.get("factor")
        attention_factor = longrope_attention_factor(
            float(factor if factor is not None else context / original), original
        )
    return LongRopeScaling(
        short=tuple(float(number) for number in fields["short_factor"]),
        long=tuple(float(number) for number in fields["long_factor"]),
        original_context_tokens=original,
        attention_factor=float(attention_factor),
    )
