"""Whether and how a model's sizes divide among ranks. Needs no torch: asked before any rank starts."""

from __future__ import annotations

from dataclasses import replace

from stepahead.worker.errors import OptionRefused
from stepahead.worker.model.config import ModelConfig


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Returns the sizes of one rank's shard; `vocab_size` stays the model's, see `shard.vocabulary_rows`.

    Raises:
        OptionRefused: a size does not divide.
    """
    faults = _undivided(config, size)
    if faults:
        possible = [other for other in range(2, config.num_heads + 1) if not _undivided(config, other)]
        advice = f"possible are {', '.join(map(str, possible))}" if possible else "this model cannot be split"
        raise OptionRefused(f"--tensor-parallel-size {size} does not divide {' and '.join(faults)}; {advice}")
    mixture = config.mixture
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        intermediate_size=config.intermediate_size // size,
        mixture=mixture and replace(mixture, intermediate_size=mixture.intermediate_size // size),
    )


def _undivided(config: ModelConfig, size: int) -> list[str]:
    """Returns the sizes that `size` ranks cannot share, by name."""
    faults: list[str] = []
    if config.num_heads % size:
        faults.append(f"num_attention_heads {config.num_heads}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        faults.append(f"num_key_value_heads {config.num_kv_heads}")
    mixture = config.mixture
    if mixture is not None and mixture.intermediate_size % size:
        faults.append(f"the experts' intermediate size {mixture.intermediate_size}")
    if (mixture is None or not all(mixture.layers)) and config.intermediate_size % size:
        faults.append(f"intermediate_size {config.intermediate_size}")
    return faults
