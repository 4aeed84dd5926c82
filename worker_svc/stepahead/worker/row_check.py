"""Checks which positions a step plan feeds, and its totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepahead.worker.slot_table import NO_HOLE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepahead.v1.worker_pb2 import StepPlan
    from stepahead.worker.slot_overlay import SlotAfter, SlotOverlay, Violations
    from stepahead.worker.slot_table import SlotIndex


@dataclass(frozen=True, slots=True)
class ExplicitRow:
    """A row named by a plan: positions start .. start + count - 1."""

    slot: int
    start: int
    count: int
    samples: bool
    refeeds_hole: bool


def check_rows(
    plan: StepPlan,
    overlay: SlotOverlay,
    members: SlotIndex,
    sitting_out: list[int],
    faults: Violations,
) -> tuple[list[ExplicitRow], SlotIndex]:
    """The plan's explicit rows, and the members of the decode set that run by default.

    Args:
        plan: whose deltas were found correct.
        overlay: the slots after the deltas.
        members: the decode set after the plan.
        sitting_out: members that do not run.
        faults: collects what is wrong.
    """
    rows = _check_explicit_rows(plan, overlay, set(sitting_out), faults)
    running = members
    if rows or sitting_out:
        idle = np.zeros(overlay.table.shape.num_slots, np.bool_)
        idle[[row.slot for row in rows]] = True
        idle[sitting_out] = True
        excluded = idle[members]
        if excluded.any():
            running = members[~excluded]
    if len(running):
        _check_running(overlay, running, faults)
    _check_totals(plan, overlay, rows, running, faults)
    return rows, running


def _check_explicit_rows(
    plan: StepPlan, overlay: SlotOverlay, sitting_out: set[int], faults: Violations
) -> list[ExplicitRow]:
    rows: list[ExplicitRow] = []
    seen: set[int] = set()
    columns = zip(plan.row_slots, plan.row_starts, plan.row_counts, plan.row_samples, strict=True)
    for index, (slot, start, count, samples) in enumerate(columns):
        field = f"row_slots[{index}]"
        if not overlay.occupied(slot, field, faults):
            continue
        if slot in seen:
            faults.add(field, f"slot {slot} has two rows")
            continue
        if slot in sitting_out:
            faults.add(field, f"slot {slot} sits out and has a row")
            continue
        seen.add(slot)
        after = overlay.after(slot)
        refeeds_hole = start != after.next_position and start == after.hole_position != NO_HOLE
        if start != after.next_position and not refeeds_hole:
            faults.add(
                f"row_starts[{index}]",
                f"slot {slot} feeds position {after.next_position} next, not {start}",
            )
        _check_span(index, (slot, start, count, samples), after, overlay, faults)
        rows.append(ExplicitRow(slot, start, count, samples, refeeds_hole))
    return rows


def _check_span(
    index: int, row: tuple[int, int, int, bool], after: SlotAfter, overlay: SlotOverlay, faults: Violations
) -> None:
    slot, start, count, samples = row
    field = f"row_counts[{index}]"
    end, history_len = start + count, after.history_len
    if count == 0:
        faults.add(field, "must be at least 1")
        return
    if end > history_len and count > 1:
        faults.add(field, f"slot {slot} has a history of {history_len}: positions up to {end - 1} are not known")
    _check_end(field, slot, end, overlay, faults)
    if start < after.replay_end < end:
        faults.add(field, f"slot {slot} replays up to position {after.replay_end - 1} in rows of its own")
    if samples and end < history_len:
        faults.add(
            f"row_samples[{index}]",
            f"slot {slot} would sample after position {end - 1} inside its history of {history_len}",
        )


def _check_running(overlay: SlotOverlay, running: SlotIndex, faults: Violations) -> None:
    """Members of the decode set: one token each at their own next position, sampling."""
    table = overlay.table
    positions = table.next_position[running]
    # Sampling is legal from the last position of the history on.
    suspect = (positions >= table.capacity[running]) | (positions < table.history_len[running] - 1)
    _recheck_touched(overlay, running, suspect)
    if not suspect.any():
        return
    for slot in running[suspect].tolist():
        after = overlay.after(slot)
        _check_end("joined_slots", slot, after.next_position + 1, overlay, faults)
        if after.next_position < after.history_len - 1:
            faults.add(
                "joined_slots",
                f"slot {slot} would sample after position {after.next_position} inside its history of "
                f"{after.history_len}",
            )


def _recheck_touched(overlay: SlotOverlay, running: SlotIndex, suspect: NDArray[np.bool_]) -> None:
    """Columns show the state before the plan: members whose slot the plan touches are judged one by one."""
    touched = list(overlay.touched())
    if not touched:
        return
    rank = np.full(overlay.table.shape.num_slots, -1, np.intp)
    rank[running] = np.arange(len(running))
    for slot in touched:
        if rank[slot] >= 0:
            after = overlay.after(slot)
            legal = after.history_len - 1 <= after.next_position < overlay.capacity(slot)
            suspect[rank[slot]] = not legal


def _check_end(field: str, slot: int, end: int, overlay: SlotOverlay, faults: Violations) -> None:
    max_model_len = overlay.table.shape.max_model_len
    if end > max_model_len:
        faults.add(field, f"slot {slot} would feed position {end - 1}, max_model_len is {max_model_len}")
    elif end > overlay.capacity(slot):
        faults.add(
            field,
            f"slot {slot} would feed position {end - 1}, its {overlay.shortest(slot)} blocks hold "
            f"{overlay.capacity(slot)} positions",
        )


def _check_totals(
    plan: StepPlan,
    overlay: SlotOverlay,
    rows: list[ExplicitRow],
    running: SlotIndex,
    faults: Violations,
) -> None:
    shape = overlay.table.shape
    total_rows = len(rows) + len(running)
    total_tokens = sum(row.count for row in rows) + len(running)
    if plan.total_rows != total_rows:
        faults.add("total_rows", f"is {plan.total_rows}, the plan runs {total_rows} rows")
    if plan.total_tokens != total_tokens:
        faults.add("total_tokens", f"is {plan.total_tokens}, the plan feeds {total_tokens} tokens")
    if total_rows > shape.max_num_seqs:
        faults.add("total_rows", f"{total_rows} rows, max_num_seqs is {shape.max_num_seqs}")
    if total_tokens > shape.max_num_batched_tokens:
        faults.add(
            "total_tokens", f"{total_tokens} tokens, max_num_batched_tokens is {shape.max_num_batched_tokens}"
        )
