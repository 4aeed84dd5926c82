"""Checks a step plan against the slot table before anything changes.

`check_plan` is pure: it reads the table, resolves the plan into `PlanEdits`, and either returns them or raises
`PlanInvalid` with one line per fault. A plan is therefore applied whole or not at all. Work is proportional to
what the plan names; the decode set is checked as columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepahead.worker.admission_check import AdmissionChecker
from stepahead.worker.decode_set_check import check_decode_set
from stepahead.worker.row_check import ExplicitRow, check_rows
from stepahead.worker.slot_overlay import SlotOverlay, Violations
from stepahead.worker.slot_table import NO_HOLE

if TYPE_CHECKING:
    from stepahead.v1.worker_pb2 import StepPlan
    from stepahead.worker.slot_table import Admission, SlotIndex, SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEdits:
    """A checked plan: what it changes and what it runs."""

    released: list[int]
    appends: list[tuple[int, int, list[int]]]  # slot, KV group, blocks
    copies: tuple[tuple[int, int], ...]
    zeroed_blocks: tuple[int, ...]
    admissions: list[Admission]
    members: SlotIndex  # the decode set from this step on; the table's own array where nothing changed
    running: SlotIndex  # members that run by default; `members` itself where all do
    rows: list[ExplicitRow]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.rows) + len(self.running)

    def apply(self, table: SlotTable, step_id: int) -> None:
        """Applies the edits in the protocol's order; rows are advanced by the batch builder."""
        for slot in self.released:
            table.release(slot)
        for slot, group, block_ids in self.appends:
            table.append_blocks(slot, group, block_ids)
        for admission in self.admissions:
            table.admit(admission)
        table.members = self.members
        for row in self.rows:
            if row.refeeds_hole:
                table.hole_position[row.slot] = NO_HOLE
                table.refed_step[row.slot] = step_id


def check_plan(plan: StepPlan, table: SlotTable, *, vocab_size: int) -> PlanEdits:
    """Resolves a plan.

    Args:
        plan: whose step id was already found to be the next one.
        table: the state after the step before; only read.
        vocab_size: width of the logits.

    Raises:
        PlanInvalid: naming every faulty field (at most 16 lines).
    """
    faults = Violations()
    _check_columns(plan, faults)
    faults.raise_if_any()
    overlay = SlotOverlay(table)
    released = _check_releases(plan, overlay, faults)
    appends = _check_appends(plan, overlay, faults)
    copies, zeroed = _check_block_writes(plan, table, faults)
    admissions = AdmissionChecker(table, overlay, faults, plan.committed_through, vocab_size).check(plan)
    members, sitting_out = check_decode_set(plan, overlay, released, faults)
    faults.raise_if_any()
    rows, running = check_rows(plan, overlay, members, sitting_out, faults)
    faults.raise_if_any()
    return PlanEdits(
        released=released,
        appends=appends,
        copies=copies,
        zeroed_blocks=zeroed,
        admissions=admissions,
        members=members,
        running=running,
        rows=rows,
    )


def _check_columns(plan: StepPlan, faults: Violations) -> None:
    """Columns that belong together have one length."""
    pairs = (
        ("released_incarnations", len(plan.released_incarnations), "released_slots", len(plan.released_slots)),
        ("append_counts", len(plan.append_counts), "append_slots", len(plan.append_slots)),
        ("append_block_ids", len(plan.append_block_ids), "sum of append_counts", sum(plan.append_counts)),
        ("copy_dst_block_ids", len(plan.copy_dst_block_ids), "copy_src_block_ids", len(plan.copy_src_block_ids)),
        ("row_starts", len(plan.row_starts), "row_slots", len(plan.row_slots)),
        ("row_counts", len(plan.row_counts), "row_slots", len(plan.row_slots)),
        ("row_samples", len(plan.row_samples), "row_slots", len(plan.row_slots)),
    )
    for name, length, other_name, other_length in pairs:
        if length != other_length:
            faults.add(name, f"has {length} entries, {other_name} asks for {other_length}")
    if plan.append_groups and len(plan.append_groups) != len(plan.append_slots):
        fault = f"has {len(plan.append_groups)} entries, append_slots asks for {len(plan.append_slots)} or none"
        faults.add("append_groups", fault)
    for name, column in (("draft_counts", plan.draft_counts), ("draft_token_ids", plan.draft_token_ids)):
        if column:
            faults.add(name, "drafts are not supported")
    if plan.settle not in (1, 2):
        faults.add("settle", f"unknown mode {plan.settle}")


def _check_releases(plan: StepPlan, overlay: SlotOverlay, faults: Violations) -> list[int]:
    released: list[int] = []
    for index, (slot, incarnation) in enumerate(zip(plan.released_slots, plan.released_incarnations, strict=True)):
        field = f"released_slots[{index}]"
        if not overlay.occupied(slot, field, faults):
            continue
        held = overlay.incarnation(slot)
        if held != incarnation:
            faults.add(f"released_incarnations[{index}]", f"slot {slot} holds {held}, not {incarnation}")
            continue
        overlay.release(slot)
        released.append(slot)
    return released


def _check_appends(plan: StepPlan, overlay: SlotOverlay, faults: Violations) -> list[tuple[int, int, list[int]]]:
    table = overlay.table
    block_ids = list(plan.append_block_ids)
    groups = list(plan.append_groups) or [0] * len(plan.append_slots)
    sizes = [group.num_blocks for group in table.shape.groups]
    appends: list[tuple[int, int, list[int]]] = []
    start = 0
    for index, (slot, group, count) in enumerate(zip(plan.append_slots, groups, plan.append_counts, strict=True)):
        blocks = block_ids[start : start + count]
        if group >= len(sizes):
            faults.add(f"append_groups[{index}]", f"group {group} is not in 0 .. {len(sizes) - 1}")
            continue
        _check_block_ids("append_block_ids", blocks, sizes[group], faults, first=start)
        start += count
        if not overlay.occupied(slot, f"append_slots[{index}]", faults):
            continue
        if count == 0:
            faults.add(f"append_counts[{index}]", "must be at least 1")
        num_blocks = overlay.num_blocks(slot, group) + count
        if num_blocks > table.max_blocks:
            faults.add(
                f"append_counts[{index}]",
                f"slot {slot} would hold {num_blocks} blocks, max_model_len allows {table.max_blocks}",
            )
            continue
        overlay.set_num_blocks(slot, group, num_blocks)
        appends.append((slot, group, blocks))
    return appends


def _check_block_writes(
    plan: StepPlan, table: SlotTable, faults: Violations
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    if not (plan.copy_src_block_ids or plan.zeroed_block_ids):
        return (), ()
    sources, targets = list(plan.copy_src_block_ids), list(plan.copy_dst_block_ids)
    zeroed = list(plan.zeroed_block_ids)
    for name, block_ids in (
        ("copy_src_block_ids", sources),
        ("copy_dst_block_ids", targets),
        ("zeroed_block_ids", zeroed),
    ):
        _check_block_ids(name, block_ids, table.shape.num_blocks, faults)
        if block_ids and table.shape.more_groups:
            faults.add(name, "blocks are copied and zeroed by workers of one KV group only")
        if block_ids and plan.total_rows == 0:
            faults.add(name, "a plan without rows launches nothing and cannot write blocks")
    return tuple(zip(sources, targets, strict=True)), tuple(zeroed)


def _check_block_ids(
    name: str, block_ids: list[int], num_blocks: int, faults: Violations, *, first: int = 0
) -> None:
    """`first` is the place of the first block in its column."""
    if block_ids and max(block_ids) >= num_blocks:
        index = next(i for i, block_id in enumerate(block_ids) if block_id >= num_blocks)
        faults.add(f"{name}[{first + index}]", f"block {block_ids[index]} is not in 0 .. {num_blocks - 1}")
