"""Builds tokenizer bundles from model files with the `transformers` library. Remote code is never run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from stepahead.worker.errors import ModelError
from stepahead.worker.model.bundle import BundleFields, write_bundle
from stepahead.worker.model.config import ModelConfig, read_config, read_json

_DEFAULT_NAMES = ("temperature", "top_p", "top_k")


def bundle_from_directory(directory: Path) -> bytes:
    """Returns the bundle of a Hugging Face directory that holds a tokenizer.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    generation = directory / "generation_config.json"
    defaults = generation_defaults(read_json(generation) if generation.exists() else {})
    return _bundle(_load("AutoTokenizer", str(directory), {}), read_config(directory), defaults, None)


def bundle_from_gguf(
    path: Path, pre_tokenizer: str, config: ModelConfig, defaults: dict[str, float | int]
) -> bytes:
    """Returns the bundle of a GGUF file.

    Args:
        path: the file.
        pre_tokenizer: its `tokenizer.ggml.pre`.
        config: the model's configuration.
        defaults: sampling defaults the file states.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    # Not AutoTokenizer: it asks for the model's configuration first, and knows fewer architectures than tokenizers.
    tokenizer = _load("PreTrainedTokenizerFast", str(path.parent), {"gguf_file": path.name})
    return _bundle(tokenizer, config, defaults, pre_tokenizer)


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """Returns the sampling defaults a `generation_config.json` states."""
    return {name: generation[name] for name in _DEFAULT_NAMES if isinstance(generation.get(name), int | float)}


def split_digits(tokenizer_json: str) -> str:
    """Returns the tokenizer with digits split one by one before the byte-level step.

    The `smollm` pre-tokenizer does so; `transformers` keeps only the byte-level part of it when it reads a GGUF
    file, and then "a  1" becomes other tokens than the model was trained on.
    """
    content = cast("dict[str, Any]", json.loads(tokenizer_json))
    byte_level = content["pre_tokenizer"]
    if byte_level["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    return json.dumps(content, ensure_ascii=False)


def _load(class_name: str, directory: str, keywords: dict[str, str]) -> Any:  # noqa: ANN401 - transformers' tokenizer types are partial
    import transformers  # noqa: PLC0415 - takes seconds, and toys and tests do without

    try:
        tokenizer_class = getattr(transformers, class_name)
        tokenizer = tokenizer_class.from_pretrained(directory, use_fast=True, trust_remote_code=False, **keywords)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"the tokenizer of {directory} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {directory} has no fast (tokenizer.json) form; supported are fast ones")
    return tokenizer


def _bundle(
    tokenizer: Any,  # noqa: ANN401 - see `_load`
    config: ModelConfig,
    defaults: dict[str, float | int],
    pre_tokenizer: str | None,
) -> bytes:
    tokenizer_json = cast("str", tokenizer.backend_tokenizer.to_str())
    if pre_tokenizer == "smollm":
        tokenizer_json = split_digits(tokenizer_json)
    encoded = cast("list[int]", tokenizer.encode("a", add_special_tokens=True))
    bos_token_id = cast("int | None", tokenizer.bos_token_id)
    eos_token_id = cast("int | None", tokenizer.eos_token_id)
    eos_token_ids = config.eos_token_ids or (() if eos_token_id is None else (eos_token_id,))
    fields = BundleFields(
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        add_bos_token=bos_token_id is not None and encoded[0] == bos_token_id,
        generation_defaults=defaults,
    )
    return write_bundle(tokenizer_json, fields, _chat_template(tokenizer))


def _chat_template(tokenizer: Any) -> str | None:  # noqa: ANN401 - see `_load`
    template = cast("str | dict[str, str] | None", tokenizer.chat_template)
    if isinstance(template, dict):  # several named templates: the one meant when nobody says otherwise
        return template.get("default")
    return template
