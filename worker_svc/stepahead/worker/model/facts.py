"""What a worker says of the model it has loaded, on whatever device."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Protocol

from stepahead.worker.model.bundle_process import make_bundle
from stepahead.worker.model.checkpoint import Checkpoint
from stepahead.worker.runner import ModelFacts


class _Loaded(Protocol):
    """What an engine knows of its own sizes."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...


def model_facts(checkpoint: Checkpoint, engine: _Loaded, dtype: str, device: str) -> ModelFacts:
    """Returns the facts of a checkpoint that `engine` has loaded.

    Args:
        checkpoint: open.
        engine: the sizes of weights and cache, in bytes.
        dtype: of weights and cache.
        device: for people.
    """
    config = checkpoint.config
    return ModelFacts(
        name=checkpoint.name,
        fingerprint=fingerprint(checkpoint, dtype),
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        dtype=dtype,
        weight_bytes=engine.weight_bytes,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        device=device,
        tokenizer_bundle=make_bundle(checkpoint),
    )


def fingerprint(checkpoint: Checkpoint, dtype: str) -> str:
    """Returns a digest of the configuration, the tensors' names and shapes, the files' sizes and the dtype."""
    identity = {
        "config": asdict(checkpoint.config),
        "tensors": sorted((name, list(shape)) for name, shape in checkpoint.weights.shapes.items()),
        "bytes": checkpoint.weights.total_bytes,
        "dtype": dtype,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
