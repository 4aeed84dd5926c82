"""The KV cache of a `DecoderStep` as Python knows it, and the checks of what a step says about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepahead.kernels.block_tables import NO_SLOT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepahead.kernels.block_tables import LayerGroups
    from stepahead.kernels.cpu.step.step_shape import StepShape
    from stepahead.kernels.ops import StepLayout


MAX_UNITS = 1 << 22
"""Work units of a phase (`csrc/pool.h`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCache:
    """Sizes of the cache and its groups of layers."""

    group_blocks: tuple[int, ...]
    """Blocks of each group."""
    group_windows: tuple[int | None, ...]
    """Positions that a query of a group's layers sees at most; None: all."""
    of_layer: tuple[int, ...]
    """The group of each layer."""
    block_size: int
    max_tokens: int
    max_positions: int


def _most_units(shape: StepShape, max_tokens: int) -> int:
    """At least as many units as any phase of a step has: panels times row units of a matrix, or attention tasks."""
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    panels = max(shape.vocab_size, 2 * shape.intermediate_size, qkv, shape.hidden_size) // 16 + 1
    tasks = max_tokens * shape.num_kv_heads * (shape.num_heads // shape.num_kv_heads // 48 + 1)
    row_units = max_tokens // 96 + 1
    if shape.mixture is not None:  # each expert has its own rows
        row_units = max_tokens * shape.mixture.experts_per_token // 96 + shape.mixture.num_experts
    return max(panels * row_units, tasks)


def step_cache(
    shape: StepShape,
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    max_positions: int,
    groups: LayerGroups | None,
) -> StepCache:
    """Returns the checked sizes; see `DecoderStep.allocate`. Raises ValueError."""
    group_blocks = (num_blocks, *(groups.more_blocks if groups else ()))
    of_layer = groups.of_layer if groups else (0,) * shape.num_layers
    for name, value in (
        *(("num_blocks", blocks) for blocks in group_blocks),
        ("block_size", block_size),
        ("max_tokens", max_tokens),
        ("max_positions", max_positions),
    ):
        if not 0 < value < 2**31:
            raise ValueError(f"{name} must be positive, not {value}")
    if _most_units(shape, max_tokens) > MAX_UNITS:
        raise ValueError(f"max_tokens: {max_tokens} are too many for one step of this model")
    if len(of_layer) != shape.num_layers or set(of_layer) != set(range(len(group_blocks))):
        raise ValueError(f"groups: {of_layer} do not fit {shape.num_layers} layers and {len(group_blocks)} groups")
    windows: list[int | None] = []
    for group in range(len(group_blocks)):
        seen = [layer.window for layer, of in zip(shape.all_layers, of_layer, strict=True) if of == group]
        known = [window for window in seen if window is not None]
        windows.append(max(known) if len(known) == len(seen) else None)
    return StepCache(
        group_blocks=group_blocks,
        group_windows=tuple(windows),
        of_layer=of_layer,
        block_size=block_size,
        max_tokens=max_tokens,
        max_positions=max_positions,
    )


def step_arrays(
    token_ids: NDArray[np.int64], layout: StepLayout, logit_tokens: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Returns the inputs by their names in abi.h: contiguous, of the right dtypes.

    Raises:
        ValueError: the groups' arrays have different shapes.
    """
    mappings, tables = layout.slot_mapping[None], layout.block_tables[None]
    if layout.more_groups:
        mappings = np.stack([layout.slot_mapping, *(group.slot_mapping for group in layout.more_groups)])
        tables = np.stack([layout.block_tables, *(group.block_tables for group in layout.more_groups)])
    inputs = {
        "token_ids": np.ascontiguousarray(token_ids, np.int64),
        "positions": np.ascontiguousarray(layout.positions, np.int64),
        "slot_mapping": np.ascontiguousarray(mappings, np.int64),
        "query_start_loc": np.ascontiguousarray(layout.query_start_loc, np.int32),
        "seq_lens": np.ascontiguousarray(layout.seq_lens, np.int32),
        "block_tables": np.ascontiguousarray(tables, np.int32),
        "logit_tokens": np.ascontiguousarray(logit_tokens, np.int64),
    }
    floors = [layout.floors, *(group.floors for group in layout.more_groups)]
    if any(each is not None for each in floors):
        none = np.zeros(len(layout.seq_lens), np.int32)
        inputs["floors"] = np.stack([none if each is None else each for each in floors]).astype(np.int32)
    return inputs


def check_range(name: str, values: NDArray[Any], end: int) -> None:
    """Raises ValueError unless every value is in 0 .. end - 1."""
    if values.size and (values.min() < 0 or values.max() >= end):
        wrong = values[(values < 0) | (values >= end)]
        raise ValueError(f"{name}: {int(wrong.flat[0])} is outside 0..{end - 1}")


def check_shapes(inputs: dict[str, NDArray[Any]], cache: StepCache) -> None:
    """Raises ValueError unless the arrays of a step are as long as they say of each other."""
    starts, lens, tables = inputs["query_start_loc"], inputs["seq_lens"], inputs["block_tables"]
    num_tokens, num_rows, num_groups = len(inputs["token_ids"]), len(lens), len(cache.group_blocks)
    if not 0 < num_tokens <= cache.max_tokens:
        raise ValueError(f"token_ids: {num_tokens} tokens; a step feeds 1..{cache.max_tokens}")
    if len(inputs["logit_tokens"]) > cache.max_tokens:
        raise ValueError(f"logit_tokens: {len(inputs['logit_tokens'])} are more than {cache.max_tokens}")
    for name, shape in (("positions", (num_tokens,)), ("slot_mapping", (num_groups, num_tokens))):
        if inputs[name].shape != shape:
            raise ValueError(f"{name} has shape {inputs[name].shape}, must be {shape}")
    if starts.shape != (num_rows + 1,) or tables.ndim != 3 or tables.shape[:2] != (num_groups, num_rows):
        raise ValueError(
            f"query_start_loc {starts.shape} and block_tables {tables.shape} do not fit {num_rows} seq_lens"
        )
    if "floors" in inputs and inputs["floors"].shape != tables.shape[:2]:
        raise ValueError(f"floors has shape {inputs['floors'].shape}, must be {tables.shape[:2]}")


def check_entries(inputs: dict[str, NDArray[Any]], vocab_size: int, cache: StepCache) -> None:
    """Raises ValueError unless compiled code can run the step without reading or writing anything else.

    Args:
        inputs: arrays that `check_shapes` accepts.
        vocab_size: token ids are below it.
        cache: what the step may touch.
    """
    starts, lens, num_tokens = inputs["query_start_loc"], inputs["seq_lens"], len(inputs["token_ids"])
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != num_tokens or counts.min() < 1:
        raise ValueError(f"query_start_loc must rise from 0 to {num_tokens}, not {starts.tolist()}")
    check_range("token_ids", inputs["token_ids"], vocab_size)
    check_range("logit_tokens", inputs["logit_tokens"], num_tokens)
    check_range("seq_lens", lens, cache.max_positions + 1)
    expected = np.arange(num_tokens) + np.repeat(lens - starts[1:], counts)
    if not np.array_equal(inputs["positions"], expected) or (lens < counts).any():
        raise ValueError("positions must be consecutive in each row and end at seq_lens - 1")
    _check_blocks(inputs, cache, lens - counts)


def _check_blocks(inputs: dict[str, NDArray[Any]], cache: StepCache, first_positions: NDArray[Any]) -> None:
    """What each row needs of a table: from the window of its first position or its floor on, to its last token."""
    lens, tables = inputs["seq_lens"], inputs["block_tables"]
    needed = -(-lens // cache.block_size)
    if needed.max() > tables.shape[2]:
        raise ValueError(f"block_tables: {tables.shape[2]} columns, a row needs {int(needed.max())}")
    columns = np.arange(tables.shape[2], dtype=np.int32)
    floors = inputs.get("floors", np.zeros(tables.shape[:2], np.int32))
    if (floors % cache.block_size).any() or (floors < 0).any() or (floors > first_positions).any():
        raise ValueError(f"floors: {floors.tolist()} are not the first of a block and at most a row's own first")
    for group, (num_blocks, window) in enumerate(zip(cache.group_blocks, cache.group_windows, strict=True)):
        slots = inputs["slot_mapping"][group]
        check_range("slot_mapping", slots[slots != NO_SLOT], num_blocks * cache.block_size)
        oldest = floors[group]
        if window is not None:
            oldest = np.maximum(first_positions - window + 1, oldest)
        used = (columns < needed[:, None]) & (columns >= oldest[:, None] // cache.block_size)
        check_range("block_tables", tables[group][used], num_blocks)
