"""Golden plan traces: whole schedules, plan by plan. A changed trace is a reviewed diff, never a surprise.

To accept a change: STEPAHEAD_UPDATE_GOLDEN=1 pytest tests/scheduler/core/test_golden_traces.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepahead.scheduler.core import Batching, Ordering, PlanOutcome, RequestKey, StepPlan, WindowPool
from tests.scheduler.core.builders import LANE, Driver

GOLDEN = Path(__file__).parent / "golden"
MAX_CALLS = 200

TRACES: dict[str, dict[str, object]] = {
    "overlap": {"overlap_depth": 1, "policy": {"prefix_caching": True}},
    "no_overlap": {"overlap_depth": 0, "policy": {"prefix_caching": True}},
    "depth_2_settled_prompts": {"overlap_depth": 2, "policy": {"settle_prompts_in_place": True}},
    "fixed_batches": {"overlap_depth": 1, "policy": {"batching": Batching.FIXED}},
    "priorities": {"overlap_depth": 1, "policy": {"ordering": Ordering.PRIORITY}},
    "windows": {"windows": (WindowPool(window=5, num_blocks=11),), "policy": {"prefix_caching": True}},
}


def describe(plan: StepPlan) -> str:
    """A plan as one line: what it carries, and nothing else."""
    parts = [f"step {plan.step_id} after {plan.committed_through} {plan.settle.value}"]
    rows = zip(plan.row_slots, plan.row_starts, plan.row_counts, plan.row_samples, strict=True)
    groups = plan.append_groups or (0,) * len(plan.append_slots)
    appends = zip(plan.append_slots, groups, plan.append_block_ids, strict=True)
    copies = zip(plan.copy_src_block_ids, plan.copy_dst_block_ids, strict=True)
    parts += [f"release {slot}" for slot in plan.released_slots]
    parts += [f"append {slot}:{block}" + (f" in group {group}" if group else "") for slot, group, block in appends]
    parts += [f"copy {source}->{destination}" for source, destination in copies]
    parts += [
        f"admit {each.slot} #{each.incarnation} {len(each.token_ids)} tokens "
        f"from {each.num_settled_tokens} in {list(each.block_ids)}"
        + (f", groups of {list(each.block_counts)} behind {list(each.null_counts)}" if each.block_counts else "")
        for each in plan.admissions
    ]
    parts += [f"join {slot}" for slot in plan.joined_slots]
    parts += [f"leave {slot}" for slot in plan.left_slots]
    parts += [f"out {slot}" for slot in plan.sit_out_slots]
    parts += [f"row {slot} {start}+{count}{' sample' if samples else ''}" for slot, start, count, samples in rows]
    return "; ".join([*parts, f"{plan.total_rows} rows, {plan.total_tokens} tokens"])


def play(options: dict[str, object]) -> list[str]:
    """Twelve requests of many shapes through a cache that is too small for them, aborts included."""
    driver = Driver.of(num_blocks=14, block_size=2, max_model_len=28, max_num_seqs=3, num_slots=9, **options)
    lines: list[str] = []
    prompt = tuple(range(100, 118))
    for key in range(1, 13):
        start = prompt if key % 2 else tuple(range(200 * key, 200 * key + 18))
        shared = start[: 2 + (key * 5) % 6]
        driver.add(
            key, (*shared, key), max_tokens=3 + (key * 7) % 18, priority=key % 3 - 1,
            fork_of=RequestKey(key - 1), stop_token_ids=frozenset({59}),
        )  # fmt: skip
    for call in range(MAX_CALLS):
        plan = driver.plan()
        lines += events(driver.outcome)
        if plan is not None:
            lines.append(describe(plan))
            continue
        if not driver.books[LANE].steps:
            assert driver.scheduler.is_idle, "O8"
            return lines
        if call in (20, 33):
            key = next(iter(driver.scheduler.sequences))
            driver.scheduler.abort(key)
            lines.append(f"abort {key}")
        step, rows = driver.books[LANE].steps[0]
        tokens = [50 + (step.step_id * 3 + index) % 11 for index, row in enumerate(rows) if row.samples]
        outcome = driver.commit(*tokens)
        pairs = zip(outcome.keys, outcome.token_ids, strict=True)
        lines.append(f"commit {step.step_id}: " + " ".join(f"{key}={token}" for key, token in pairs))
        lines += [f"end {end.key} {end.reason.value} {end.num_output_tokens}" for end in outcome.finished]
    raise AssertionError("O8: not at rest")


def events(outcome: PlanOutcome) -> list[str]:
    lines = [f"preempt {event.key}" for event in outcome.preempted]
    return lines + [f"admitted {event.key} cached {event.num_cached_tokens}" for event in outcome.admitted]


@pytest.mark.parametrize("name", TRACES)
def test_the_schedule_is_the_recorded_one(name: str) -> None:
    """Same calls, same plans: the core reads no clock and draws no number."""
    path = GOLDEN / f"{name}.txt"
    text = "\n".join(play(TRACES[name])) + "\n"
    if os.environ.get("STEPAHEAD_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
