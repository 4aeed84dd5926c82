"""How many KV blocks to allocate, and how long a sequence may get.

Layers that see a window keep what is in it, so their cost per sequence does not grow with its length:

    layers       blocks of one sequence of length L              blocks of the pool, at most
    see all      ceil(L / B)                                     max_num_seqs sequences
    window W     min(ceil(L / B), ceil((W + D) / B) + 1)         max_num_seqs sequences, and chunks in flight
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.runner import CacheGroup, CacheShape

if TYPE_CHECKING:
    from stepahead.worker.runner import ModelFacts
    from stepahead.worker.settings import WorkerSettings

DEFAULT_MAX_MODEL_LEN = 4096
MIN_MODEL_LEN = 2
"""One token of a prompt and one of output; a scheduler refuses a worker that holds less."""
MEMORY_SHARE = 0.25
"""Of the host's available memory, for a cache whose size was not given."""


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers of one KV group."""

    window: int  # 0: they see all
    block_bytes: int  # in all layers of the group

    def blocks_of_one(self, length: int, settings: WorkerSettings) -> int:
        """Blocks that a sequence of `length` holds at once, fed token by token."""
        whole = -(-length // settings.block_size)
        if not self.window:
            return whole
        return min(whole, -(-(self.window + settings.max_overlap_depth) // settings.block_size) + 1)

    def blocks_wanted(self, length: int, settings: WorkerSettings) -> int:
        """Blocks with which no sequence ever waits for another."""
        whole = settings.max_num_seqs * -(-length // settings.block_size)
        in_flight = (settings.max_overlap_depth + 1) * settings.max_num_batched_tokens
        chunks = -(-in_flight // settings.block_size) if self.window else 0
        return min(whole, settings.max_num_seqs * self.blocks_of_one(length, settings) + chunks)


def step_limits(settings: WorkerSettings, facts: ModelFacts) -> CacheShape:
    """The shape of batch and cache with as many blocks as one sequence needs: what a step can be, before sizing."""
    longest = settings.max_model_len or min(facts.max_context_tokens, DEFAULT_MAX_MODEL_LEN)
    return CacheShape(
        num_slots=settings.num_slots,
        num_blocks=-(-longest // settings.block_size),
        block_size=settings.block_size,
        max_model_len=longest,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
    )


def size_cache(
    settings: WorkerSettings, facts: ModelFacts, available_bytes: int, *, fill: bool = False
) -> CacheShape:
    """The shape of batch and cache.

    A cache size that is not given covers max_num_seqs sequences of max_model_len, within a quarter of the
    available memory. A max_model_len that is not given shrinks to what the cache holds. A size in blocks is that of
    the layers that see everything; a window that no sequence can outgrow is none.

    Args:
        settings: limits, given or not.
        facts: of the loaded model.
        available_bytes: memory that could be used now.
        fill: the memory is for the cache alone: one whose size was not given takes all, to keep more prefixes.

    Raises:
        OptionRefused: not even one sequence of max_model_len (not given: of two tokens) fits a cache of the size
            given, or the model's context is shorter.
        ModelError: no sequence fits the memory, or the model.
    """
    refuse_longer(settings.max_model_len, facts.max_context_tokens, facts.name)
    if facts.max_context_tokens < MIN_MODEL_LEN:
        message = f"{facts.name} supports {facts.max_context_tokens} positions, the least is {MIN_MODEL_LEN}"
        raise ModelError(message)
    length = settings.max_model_len or min(facts.max_context_tokens, DEFAULT_MAX_MODEL_LEN)
    windows = [window if window < length else 0 for window in facts.layer_windows] or [0]
    sizes = sorted(set(windows))
    layer_bytes = settings.block_size * facts.kv_bytes_per_token // len(windows)
    groups = [_Layers(window, windows.count(window) * layer_bytes) for window in sizes]
    blocks = _share_out(settings, groups, length, available_bytes, fill=fill)
    if settings.max_model_len is None:
        length = min([length, *_lengths_held(settings, groups, blocks)])
    for group, num_blocks in zip(groups, blocks, strict=True):
        _check_fits(settings, group, num_blocks, length)
    return CacheShape(
        num_slots=settings.num_slots,
        num_blocks=blocks[0],
        window=sizes[0],
        block_size=settings.block_size,
        max_model_len=length,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        more_groups=tuple(map(CacheGroup, sizes[1:], blocks[1:])),
        group_of_layer=tuple(sizes.index(window) for window in windows),
        replays_windows=facts.replays_windows and any(sizes),
    )


def refuse_longer(max_model_len: int | None, max_context_tokens: int, name: str) -> None:
    """Raises `OptionRefused` for sequences longer than the model called `name` supports."""
    if max_model_len is not None and max_model_len > max_context_tokens:
        message = f"--max-model-len {max_model_len} is more than the {max_context_tokens} positions {name} supports"
        raise OptionRefused(message)


def refuse_larger(settings: WorkerSettings, shape: CacheShape, facts: ModelFacts, available_bytes: int) -> None:
    """Raises `OptionRefused` for a cache whose size was given and does not fit the memory that could be used now.

    The system would hand such a cache out, and kill the process when the pages are written to.
    """
    needed_bytes = sum(cache_bytes(shape, facts))
    if needed_bytes <= available_bytes:
        return
    given = (("--num-kv-blocks", settings.num_kv_blocks), ("--kv-cache-bytes", settings.kv_cache_bytes))
    for option, value in given:
        if value is not None:
            message = (
                f"{option} {value}: the KV cache needs {needed_bytes} bytes, and {available_bytes} bytes of memory "
                f"are available beside the weights"
            )
            raise OptionRefused(message)


def cache_bytes(shape: CacheShape, facts: ModelFacts) -> tuple[int, ...]:
    """Bytes of the cache by KV group."""
    layers = shape.group_of_layer or (0,)
    layer_bytes = shape.block_size * facts.kv_bytes_per_token // len(layers)
    return tuple(group.num_blocks * layers.count(index) * layer_bytes for index, group in enumerate(shape.groups))


def num_concurrent(shape: CacheShape, settings: WorkerSettings) -> float:
    """Sequences of max_model_len that the cache holds at once."""
    return min(
        group.num_blocks / _Layers(group.window, 0).blocks_of_one(shape.max_model_len, settings)
        for group in shape.groups
    )


def describe_groups(shape: CacheShape) -> str:
    """The KV groups for a person: blocks, and the window where there is one."""
    return ", ".join(
        f"{group.num_blocks} blocks" + (f" for windows of {group.window}" if group.window else "")
        for group in shape.groups
    )


def _share_out(
    settings: WorkerSettings, groups: list[_Layers], length: int, available_bytes: int, *, fill: bool
) -> list[int]:
    """Blocks of each group. What windows do not want, the first group gets."""
    wanted = [group.blocks_wanted(length, settings) for group in groups]
    if settings.num_kv_blocks is not None:
        return [settings.num_kv_blocks, *(min(settings.num_kv_blocks, want) for want in wanted[1:])]
    needed_bytes = sum(want * group.block_bytes for want, group in zip(wanted, groups, strict=True))
    if settings.kv_cache_bytes is not None:
        if not needed_bytes:
            message = "--kv-cache-bytes: this model has no KV cache; give --num-kv-blocks instead"
            raise OptionRefused(message)
        budget = settings.kv_cache_bytes
    else:
        budget = available_bytes if fill else min(needed_bytes, int(available_bytes * MEMORY_SHARE))
    if not needed_bytes:
        return wanted
    blocks = wanted
    if budget < needed_bytes:
        least = [group.blocks_of_one(length, settings) for group in groups]
        blocks = [max(few, want * budget // needed_bytes) for few, want in zip(least, wanted, strict=True)]
    others = sum(count * group.block_bytes for count, group in zip(blocks[1:], groups[1:], strict=True))
    return [max(0, (budget - others) // groups[0].block_bytes), *blocks[1:]]


def _lengths_held(settings: WorkerSettings, groups: list[_Layers], blocks: list[int]) -> list[int]:
    """The longest sequence of each group that does not hold any length."""
    size = settings.block_size
    return [
        num_blocks * size
        for group, num_blocks in zip(groups, blocks, strict=True)
        if num_blocks < group.blocks_of_one(num_blocks * size + 1, settings)
    ]


def _check_fits(settings: WorkerSettings, group: _Layers, num_blocks: int, length: int) -> None:
    least = max(length, MIN_MODEL_LEN)
    needed = group.blocks_of_one(least, settings)
    if num_blocks >= needed:
        return
    if settings.max_model_len is None:
        what, remedy = f"{least} tokens, the shortest there is,", "raise"
    else:
        what, remedy = f"--max-model-len {least}", "lower --max-model-len, or raise"
    kind = f" for windows of {group.window}" if group.window else ""
    message = (
        f"the KV cache holds {num_blocks} blocks of {settings.block_size} tokens{kind} "
        f"({num_blocks * group.block_bytes} bytes), one sequence of {what} needs {needed} "
        f"({needed * group.block_bytes} bytes): {remedy} --num-kv-blocks or --kv-cache-bytes"
    )
    was_asked = (settings.max_model_len, settings.num_kv_blocks, settings.kv_cache_bytes) != (None, None, None)
    raise OptionRefused(message) if was_asked else ModelError(message)
