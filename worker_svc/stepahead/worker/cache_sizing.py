"""How many KV blocks to allocate, and how long a sequence may get."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepahead.worker.errors import ModelError
from stepahead.worker.runner import CacheShape

if TYPE_CHECKING:
    from stepahead.worker.runner import ModelFacts
    from stepahead.worker.settings import WorkerSettings

DEFAULT_MAX_MODEL_LEN = 4096
MEMORY_SHARE = 0.25
"""Of the available memory, for a cache whose size was not given."""


def size_cache(settings: WorkerSettings, facts: ModelFacts, available_bytes: int) -> CacheShape:
    """The shape of batch and cache.

    A cache size that is not given covers max_num_seqs sequences of max_model_len, within a quarter of the
    available memory. A max_model_len that is not given shrinks to what the cache holds.

    Args:
        settings: limits, given or not.
        facts: of the loaded model.
        available_bytes: memory that could be used now.

    Raises:
        ModelError: not even one sequence of max_model_len fits, or the model's context is shorter.
    """
    block_size = settings.block_size
    block_bytes = block_size * facts.kv_bytes_per_token
    if settings.max_model_len is not None and settings.max_model_len > facts.max_context_tokens:
        message = (
            f"--max-model-len {settings.max_model_len} is more than the {facts.max_context_tokens} positions "
            f"{facts.name} supports"
        )
        raise ModelError(message)
    wanted_len = settings.max_model_len or min(facts.max_context_tokens, DEFAULT_MAX_MODEL_LEN)
    budget = _given_blocks(settings, block_bytes)
    if budget is None:
        wanted = settings.max_num_seqs * -(-wanted_len // block_size)
        affordable = int(available_bytes * MEMORY_SHARE) // block_bytes if block_bytes else wanted
        budget = min(wanted, affordable)
    if settings.max_model_len is None:
        wanted_len = min(wanted_len, budget * block_size)
    if budget < 1 or budget * block_size < wanted_len:
        needed = -(-wanted_len // block_size)
        message = (
            f"the KV cache holds {budget} blocks of {block_size} tokens ({budget * block_bytes} bytes), one "
            f"sequence of max_model_len {wanted_len} needs {needed} ({needed * block_bytes} bytes): lower "
            f"--max-model-len, or raise --num-kv-blocks or --kv-cache-bytes"
        )
        raise ModelError(message)
    return CacheShape(
        num_slots=settings.num_slots,
        num_blocks=budget,
        block_size=block_size,
        max_model_len=wanted_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
    )


def available_memory_bytes() -> int:
    """Memory this process could still use: the machine's, and its control group's limit where there is one."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except OSError:  # no control groups, or version 1
        return available
    return available if limit == "max" else min(available, max(int(limit) - used, 0))


def _given_blocks(settings: WorkerSettings, block_bytes: int) -> int | None:
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks
    if settings.kv_cache_bytes is None:
        return None
    if block_bytes == 0:
        message = "--kv-cache-bytes: this model has no KV cache; give --num-kv-blocks instead"
        raise ModelError(message)
    return settings.kv_cache_bytes // block_bytes
