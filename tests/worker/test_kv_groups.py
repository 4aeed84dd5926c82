"""KV groups in the worker: what a plan may say about them, the tables, and how memory is shared out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepahead.kernels.block_tables import NULL_BLOCK
from stepahead.worker.cache_sizing import cache_bytes, describe_groups, num_concurrent, size_cache
from stepahead.worker.convert import worker_info_message
from stepahead.worker.errors import ModelError, PlanInvalid
from stepahead.worker.runner import CacheGroup
from tests.worker.plans import SHAPE, TableDriver, admission, plan
from tests.worker.test_worker_settings import FACTS, free

MIXED = replace(SHAPE, more_groups=(CacheGroup(window=3, num_blocks=7),), group_of_layer=(0, 1, 1))
WINDOWED = replace(SHAPE, window=3, num_blocks=7)


def started(**fields: Any) -> TableDriver:
    """A sequence of 9 tokens in slot 1 of a mixed worker: blocks 2, 3, 4 of group 0 and 5, 6, 1 of group 1."""
    driver = TableDriver(MIXED)
    admitted = admission(1, list(range(9)), block_ids=[2, 3, 4, 5, 6, 1], block_counts=[3, 3], **fields)
    driver.run(plan(1, rows=[(1, 0, 8, False)], admissions=[admitted]))
    return driver


def test_each_group_has_a_table_and_a_place_for_every_token() -> None:
    driver = TableDriver(MIXED)
    admitted = admission(1, list(range(9)), block_ids=[2, 3, 4, 5, 6, 1], block_counts=[3, 3])
    batch, _ = driver.run(plan(1, rows=[(1, 0, 6, False)], admissions=[admitted]))
    assert batch.block_tables.tolist() == [[2, 3]]
    assert batch.slot_mapping.tolist() == [8, 9, 10, 11, 12, 13]
    (group,) = batch.more_groups
    assert group.block_tables.tolist() == [[5, 6]]
    assert group.slot_mapping.tolist() == [20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize(("start", "expected"), [(5, [5, 6]), (6, [NULL_BLOCK, 6]), (7, [NULL_BLOCK, 6])])
def test_n3_what_left_the_window_of_a_rows_first_position_is_null(start: int, expected: list[int]) -> None:
    """Window 3, blocks of 4: position 6 reads 4, 5 and 6, so block 0 is not its business any more (rule N1)."""
    driver = TableDriver(MIXED)
    admitted = admission(1, list(range(9)), block_ids=[2, 3, 4, 5, 6, 1], block_counts=[3, 3])
    driver.run(plan(1, rows=[(1, 0, start, False)], admissions=[admitted]))
    batch, _ = driver.run(plan(2, rows=[(1, start, 1, False)]))
    assert batch.block_tables.tolist() == [[2, 3]]
    assert batch.more_groups[0].block_tables.tolist() == [expected]


def test_n2_of_a_chunk_the_first_position_decides() -> None:
    driver = TableDriver(MIXED)
    admitted = admission(1, list(range(9)), block_ids=[2, 3, 4, 5, 6, 1], block_counts=[3, 3])
    driver.run(plan(1, rows=[(1, 0, 5, False)], admissions=[admitted]))
    batch, _ = driver.run(plan(2, rows=[(1, 5, 4, True)]))
    assert batch.more_groups[0].block_tables.tolist() == [[5, 6, 1]]


def test_a_worker_whose_only_group_has_a_window() -> None:
    driver = TableDriver(WINDOWED)
    admitted = admission(1, list(range(9)), block_ids=[6, 1], null_counts=[1], num_settled_tokens=8)
    batch, _ = driver.run(plan(1, rows=[(1, 8, 1, True)], admissions=[admitted]))
    assert batch.block_tables.tolist() == [[NULL_BLOCK, 6, 1]]
    assert batch.slot_mapping.tolist() == [4]
    assert batch.more_groups == ()


def test_tables_grow_group_by_group_and_the_shortest_one_is_the_limit() -> None:
    driver = started()
    driver.run(plan(2, rows=[(1, 8, 1, True)], append_slots=[1], append_counts=[1], append_block_ids=[9]))
    assert driver.table.capacity[1] == 12
    with pytest.raises(PlanInvalid, match="its 3 blocks hold 12 positions"):
        driver.run(plan(3, rows=[(1, 9, 4, True)]))
    driver.apply(plan(3, append_slots=[1], append_counts=[1], append_block_ids=[0], append_groups=[1]))
    assert [table.block_tables[1].tolist() for table in driver.table.groups] == [[2, 3, 4, 9], [5, 6, 1, 0]]
    assert driver.table.capacity[1] == 16


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"append_groups": [1, 1]}, "append_groups: has 2 entries, append_slots asks for 1 or none"),
        ({"append_groups": [2]}, "append_groups.0.: group 2 is not in 0 .. 1"),
        ({"append_groups": [1], "append_block_ids": [7]}, "append_block_ids.0.: block 7 is not in 0 .. 6"),
        ({"copy_src_block_ids": [1], "copy_dst_block_ids": [2]}, "workers of one KV group only"),
        ({"zeroed_block_ids": [1]}, "zeroed_block_ids: blocks are copied and zeroed by workers of one KV group"),
    ],
)
def test_faults_of_appends_and_copies_are_named(fields: dict[str, Any], fault: str) -> None:
    driver = started()
    before = driver.snapshot()
    appends = {"append_slots": [1], "append_counts": [1], "append_block_ids": [3]}
    with pytest.raises(PlanInvalid, match=fault):
        driver.run(plan(2, rows=[(1, 8, 1, True)], **(appends | fields)))
    assert driver.snapshot() == before


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"block_counts": [6]}, "block_counts: has 1 entries, there are 2 KV groups"),
        ({"block_counts": [3, 2]}, "block_counts: name 5 blocks of 6"),
        ({"block_counts": [3, 3], "null_counts": [1]}, "null_counts: has 1 entries, there are 2 KV groups"),
        ({"block_counts": [3, 3], "null_counts": [1, 0], "num_settled_tokens": 8}, "null_counts: 1 null blocks"),
        ({"block_counts": [3, 3], "null_counts": [0, 1], "num_settled_tokens": 5}, "null_counts: 1 null blocks"),
        ({"block_counts": [1, 5]}, "max_model_len allows 4"),
        ({"block_counts": [4, 2], "block_ids": [2, 3, 4, 5, 7, 1]}, "block_ids.4.: block 7 is not in 0 .. 6"),
        ({"block_counts": [5, 1], "num_settled_tokens": 8}, "8 do not fit 1 blocks of 4"),
    ],
)
def test_faults_of_admissions_are_named(fields: dict[str, Any], fault: str) -> None:
    driver = TableDriver(MIXED)
    admitted = admission(1, list(range(9)), **({"block_ids": [2, 3, 4, 5, 6, 1]} | fields))
    with pytest.raises(PlanInvalid, match=fault):
        driver.run(plan(1, rows=[(1, admitted.num_settled_tokens, 1, False)], admissions=[admitted]))


# ------------------------------------------------------------------------------------------------ sizes

LAYERS = replace(FACTS, layer_windows=(6, 0, 6, 6), kv_bytes_per_token=16)
"""Four layers of 4 bytes a token; three of them see 6 positions. Blocks of 4 tokens, 64 positions, 3 sequences."""


def test_windows_get_what_their_sequences_hold_at_once() -> None:
    """3 sequences of ceil((6 + 2) / 4) + 1 = 3 blocks, and 3 steps of 8 tokens in flight: 15; the others 3 x 16."""
    shape = size_cache(free(), LAYERS, 1 << 30)
    assert shape.groups == (CacheGroup(0, 48), CacheGroup(6, 15))
    assert shape.group_of_layer == (1, 0, 1, 1)
    assert cache_bytes(shape, LAYERS) == (48 * 4 * 4, 15 * 4 * 12)
    assert num_concurrent(shape, free()) == 3
    assert describe_groups(shape) == "48 blocks, 15 blocks for windows of 6"


def test_memory_that_does_not_suffice_is_shared_out_in_proportion() -> None:
    """1488 bytes would be wanted; of 1000 the window layers get two thirds of what they want."""
    shape = size_cache(free(kv_cache_bytes=1000), LAYERS, 0)
    assert [group.num_blocks for group in shape.groups] == [(1000 - 10 * 48) // 16, 10]
    assert sum(cache_bytes(shape, LAYERS)) <= 1000


def test_memory_that_windows_do_not_want_goes_to_the_layers_that_see_everything() -> None:
    shape = size_cache(free(kv_cache_bytes=10_000), LAYERS, 0)
    assert [group.num_blocks for group in shape.groups] == [(10_000 - 15 * 48) // 16, 15]


def test_a_size_in_blocks_is_that_of_the_layers_that_see_everything() -> None:
    assert [group.num_blocks for group in size_cache(free(num_kv_blocks=16), LAYERS, 0).groups] == [16, 15]
    assert [group.num_blocks for group in size_cache(free(num_kv_blocks=9), LAYERS, 0).groups] == [9, 9]
    assert size_cache(free(num_kv_blocks=9), LAYERS, 0).max_model_len == 36


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    shape = size_cache(free(max_model_len=6), LAYERS, 1 << 30)
    assert (shape.groups, shape.group_of_layer) == ((CacheGroup(0, 6),), (0, 0, 0, 0))


def test_a_model_of_window_layers_alone_serves_any_length_from_a_small_pool() -> None:
    facts = replace(LAYERS, layer_windows=(6, 6))
    shape = size_cache(free(num_kv_blocks=3), facts, 0)
    assert (shape.groups, shape.max_model_len) == ((CacheGroup(6, 3),), 64)
    assert size_cache(free(num_kv_blocks=2), facts, 0).max_model_len == 8
    with pytest.raises(ModelError, match=r"holds 2 blocks of 4 tokens for windows of 6 .* needs 3 "):
        size_cache(free(num_kv_blocks=2, max_model_len=64), facts, 0)


def test_the_groups_are_told() -> None:
    shape = size_cache(free(), LAYERS, 1 << 30)
    info = worker_info_message(LAYERS, shape, worker_instance_id="w", max_overlap_depth=2, version="1")
    told = [(g.window_tokens, g.num_layers, g.num_blocks, g.kv_bytes_per_token) for g in info.limits.kv_groups]
    assert told == [(0, 1, 48, 4), (6, 3, 15, 12)]
    assert (info.limits.num_blocks, info.limits.kv_cache_bytes) == (63, 48 * 16 + 15 * 48)
