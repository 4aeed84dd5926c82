"""Checks how a step plan edits the decode set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepahead.v1.worker_pb2 import StepPlan
    from stepahead.worker.slot_overlay import SlotOverlay, Violations
    from stepahead.worker.slot_table import SlotIndex


def check_decode_set(
    plan: StepPlan, overlay: SlotOverlay, released: list[int], faults: Violations
) -> tuple[SlotIndex, list[int]]:
    """The decode set after the plan, and its members that sit out.

    Args:
        plan: whose releases and admissions are in the overlay.
        overlay: the slots after them.
        released: slots that leave the batch, and with it the set.
        faults: collects what is wrong.

    Returns:
        The members by joining order (the table's own array where nothing changed), and the members that do not
        run in this step.
    """
    members = overlay.table.members
    if not (plan.joined_slots or plan.left_slots or plan.sit_out_slots or released):
        return members, []
    is_member = np.zeros(overlay.table.shape.num_slots, np.bool_)
    is_member[members] = True
    is_member[released] = False
    for index, slot in enumerate(plan.left_slots):
        if _names_member(f"left_slots[{index}]", slot, is_member, overlay, faults):
            is_member[slot] = False
    if not is_member[members].all():
        members = members[is_member[members]]
    joined: list[int] = []
    for index, slot in enumerate(plan.joined_slots):
        field = f"joined_slots[{index}]"
        if not overlay.occupied(slot, field, faults):
            continue
        if is_member[slot]:
            faults.add(field, f"slot {slot} is in the decode set already")
            continue
        is_member[slot] = True
        joined.append(slot)
    if joined:
        members = np.concatenate([members, np.array(joined, np.intp)])
    sitting_out: list[int] = []
    for index, slot in enumerate(plan.sit_out_slots):
        if _names_member(f"sit_out_slots[{index}]", slot, is_member, overlay, faults):
            is_member[slot] = False  # a slot named twice is not a member the second time
            sitting_out.append(slot)
    return members, sitting_out


def _names_member(
    field: str, slot: int, is_member: NDArray[np.bool_], overlay: SlotOverlay, faults: Violations
) -> bool:
    if not overlay.occupied(slot, field, faults):
        return False
    if not is_member[slot]:
        faults.add(field, f"slot {slot} is not in the decode set")
        return False
    return True
