"""Replays of window groups in the worker: what a plan may say about them, and what a step's arrays become."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepahead.kernels.block_tables import NO_SLOT, NULL_BLOCK
from stepahead.worker.cache_sizing import size_cache
from stepahead.worker.convert import worker_info_message
from stepahead.worker.errors import PlanInvalid
from stepahead.worker.runner import CacheGroup
from tests.worker.plans import SHAPE, TableDriver, admission, plan
from tests.worker.test_worker_settings import FACTS, free

MIXED = replace(
    SHAPE,
    more_groups=(CacheGroup(window=3, num_blocks=7),),
    group_of_layer=(0, 1, 1),
    replays_windows=True,
)
WINDOWED = replace(SHAPE, window=3, num_blocks=7, replays_windows=True)


def replayed(**fields: Any) -> Any:
    """14 tokens in slot 1: 12 settled in blocks 2, 3, 4 (then 8) of group 0; 4 .. 11 again into 5, 6 of group 1."""
    columns = {"block_ids": [2, 3, 4, 8, 5, 6, 1], "block_counts": [4, 3], "null_counts": [0, 1]}
    defaults = {"num_settled_tokens": 12, "replay_start": 4}
    return admission(1, list(range(14)), **(columns | defaults | fields))


def test_n6_n7_a_replay_writes_the_window_group_alone_and_sees_from_its_start() -> None:
    driver = TableDriver(MIXED)
    batch, _ = driver.run(plan(1, rows=[(1, 4, 5, False)], admissions=[replayed()]))
    assert batch.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert batch.slot_mapping.tolist() == [NO_SLOT] * 5
    assert batch.floors is None
    assert batch.block_tables.tolist() == [[2, 3, 4]]
    (group,) = batch.more_groups
    assert group.slot_mapping.tolist() == [20, 21, 22, 23, 24]
    assert group.block_tables.tolist() == [[NULL_BLOCK, 5, 6]]
    assert group.floors is not None
    assert group.floors.tolist() == [4]


def test_n5_behind_a_replay_everything_is_written_and_the_last_row_samples() -> None:
    """Beside a row of somebody else, which knows of no replay."""
    driver = TableDriver(MIXED)
    driver.run(plan(1, rows=[(1, 4, 5, False)], admissions=[replayed()]))
    other = admission(2, [7, 8], block_ids=[9, 0], block_counts=[1, 1])
    batch, _ = driver.run(plan(2, rows=[(1, 9, 3, False), (2, 0, 2, True)], admissions=[other]))
    assert batch.slot_mapping.tolist() == [NO_SLOT] * 3 + [36, 37]
    (group,) = batch.more_groups
    assert group.floors is not None
    assert group.floors.tolist() == [4, 0]
    batch, rows = driver.run(plan(3, rows=[(1, 12, 2, True)]))
    assert batch.slot_mapping.tolist() == [32, 33]
    assert [each.floors for each in (batch, *batch.more_groups)] == [None, None]
    assert rows.sample_rows.tolist() == [0]


def test_a_worker_of_window_layers_alone_replays_up_to_any_position() -> None:
    driver = TableDriver(WINDOWED)
    fields = {"block_ids": [5, 6, 1], "null_counts": [1], "num_settled_tokens": 11, "block_counts": []}
    batch, _ = driver.run(plan(1, rows=[(1, 4, 7, False)], admissions=[replayed(**fields)]))
    assert batch.slot_mapping.tolist() == [20, 21, 22, 23, 24, 25, 26]
    assert batch.floors is not None
    assert batch.floors.tolist() == [4]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"replay_start": 11}, "replay_start: 11 is less than 2 positions, a whole window, before"),
        ({"replay_start": 12}, "replay_start: 12 is less than 2 positions"),
        ({"replay_start": 6}, "replay_start: 6 is no multiple of block_size 4"),
        ({"replay_start": 4, "null_counts": [0, 2]}, "null_counts: 2 null blocks of 4, but position 4 is seen"),
        ({"replay_start": 4, "null_counts": [1, 1]}, "null_counts: 1 null blocks"),
        ({"replay_start": 8, "block_ids": [2, 3, 5, 6, 1], "block_counts": [2, 3]}, "12 do not fit 2 blocks of 4"),
    ],
)
def test_faults_of_replays_are_named(fields: dict[str, Any], fault: str) -> None:
    driver = TableDriver(MIXED)
    before = driver.snapshot()
    with pytest.raises(PlanInvalid, match=fault):
        driver.run(plan(1, rows=[(1, 4, 1, False)], admissions=[replayed(**fields)]))
    assert driver.snapshot() == before


@pytest.mark.parametrize("shape", [replace(MIXED, replays_windows=False), SHAPE])
def test_a_worker_that_cannot_replay_refuses_one(shape: Any) -> None:
    fields = {} if shape.more_groups else {"block_ids": [2, 3, 4, 8], "block_counts": [], "null_counts": []}
    with pytest.raises(PlanInvalid, match="replay_start: this worker has no windows that can be computed again"):
        TableDriver(shape).run(plan(1, rows=[(1, 12, 1, False)], admissions=[replayed(**fields)]))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ((1, 4, 9, False), "slot 1 replays up to position 11 in rows of its own"),
        ((1, 4, 8, True), "would sample after position 11 inside its history of 14"),
        ((1, 12, 2, True), "slot 1 feeds position 4 next, not 12"),
    ],
)
def test_n5_a_row_is_of_the_replay_or_behind_it(row: tuple[int, int, int, bool], fault: str) -> None:
    driver = TableDriver(replace(MIXED, max_num_batched_tokens=16))
    with pytest.raises(PlanInvalid, match=fault):
        driver.run(plan(1, rows=[row], admissions=[replayed()]))


def test_a_slot_forgets_the_replay_of_its_last_owner() -> None:
    driver = TableDriver(MIXED)
    driver.run(plan(1, rows=[(1, 4, 5, False)], admissions=[replayed()]))
    fields = {"incarnation": 7, "block_ids": [0, 1], "block_counts": [1, 1]}
    batch, _ = driver.run(
        plan(2, rows=[(1, 0, 2, True)], released_slots=[1], released_incarnations=[101],
             admissions=[admission(1, [3, 4], **fields)])
    )  # fmt: skip
    assert batch.slot_mapping.tolist() == [0, 1]
    assert batch.more_groups[0].floors is None


def test_the_worker_says_whether_it_replays() -> None:
    """Only where the runner can, and where there are windows."""
    for can, windows, told in ((True, (6, 0), True), (True, (0, 0), False), (False, (6, 0), False)):
        facts = replace(FACTS, layer_windows=windows, replays_windows=can)
        shape = size_cache(free(), facts, 1 << 30)
        info = worker_info_message(facts, shape, worker_instance_id="w", max_overlap_depth=2, version="1")
        assert info.limits.replays_windows == told
