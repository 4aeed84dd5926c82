"""What the slots a plan names will look like once its deltas are applied, without applying them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepahead.worker.errors import PlanInvalid
from stepahead.worker.slot_table import NO_HOLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepahead.worker.slot_table import Admission, SlotTable

MAX_VIOLATIONS = 16


class Violations:
    """Collects faults, each naming its field; keeps the first `MAX_VIOLATIONS`."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_faults = 0

    def add(self, field: str, fault: str) -> None:
        """Adds one fault."""
        self._num_faults += 1
        if len(self._lines) < MAX_VIOLATIONS:
            self._lines.append(f"{field}: {fault}")

    def raise_if_any(self) -> None:
        """Raises `PlanInvalid` if there is a fault."""
        if not self._lines:
            return
        hidden = self._num_faults - len(self._lines)
        raise PlanInvalid([*self._lines, f"and {hidden} more"] if hidden else self._lines)


@dataclass(slots=True)
class SlotAfter:
    """A slot as it will be. Positions and lengths in tokens."""

    incarnation: int
    next_position: int
    replay_end: int
    """Rows from a position in front of it are of a replay."""
    history_len: int
    num_blocks: tuple[int, ...]
    """By KV group."""
    hole_position: int


class SlotOverlay:
    """The table plus the deltas seen so far.

    Args:
        table: the state before the plan; only read.
    """

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self._touched: dict[int, SlotAfter] = {}

    def touched(self) -> Iterable[int]:
        """Slots that differ from the table."""
        return self._touched.keys()

    def after(self, slot: int) -> SlotAfter:
        """The slot as it will be."""
        known = self._touched.get(slot)
        if known is not None:
            return known
        table = self.table
        return SlotAfter(
            incarnation=int(table.incarnation[slot]),
            next_position=int(table.next_position[slot]),
            replay_end=int(table.replay_end[slot]),
            history_len=int(table.history_len[slot]),
            num_blocks=tuple(int(group.num_blocks[slot]) for group in table.groups),
            hole_position=int(table.hole_position[slot]),
        )

    def occupied(self, slot: int, field: str, faults: Violations) -> bool:
        """Whether the slot exists and holds a sequence; a fault of `field` otherwise."""
        if not self.exists(slot, field, faults):
            return False
        if self.incarnation(slot) == 0:
            faults.add(field, f"slot {slot} is free")
            return False
        return True

    def exists(self, slot: int, field: str, faults: Violations) -> bool:
        """Whether the slot is in range; a fault of `field` otherwise."""
        num_slots = self.table.shape.num_slots
        if slot < num_slots:
            return True
        faults.add(field, f"slot {slot} is not in 0 .. {num_slots - 1}")
        return False

    def incarnation(self, slot: int) -> int:
        """Incarnation the slot will hold; 0: none."""
        known = self._touched.get(slot)
        return int(self.table.incarnation[slot]) if known is None else known.incarnation

    def num_blocks(self, slot: int, group: int) -> int:
        """Length of the slot's block table in a KV group."""
        return self.after(slot).num_blocks[group]

    def shortest(self, slot: int) -> int:
        """Length of the slot's shortest block table."""
        return min(self.after(slot).num_blocks)

    def capacity(self, slot: int) -> int:
        """Positions the slot's block tables and max_model_len allow."""
        shape = self.table.shape
        return min(self.shortest(slot) * shape.block_size, shape.max_model_len)

    def release(self, slot: int) -> None:
        """The slot becomes free."""
        self._touch(slot).incarnation = 0

    def set_num_blocks(self, slot: int, group: int, num_blocks: int) -> None:
        """The slot's block table in a KV group grows."""
        after = self._touch(slot)
        after.num_blocks = (*after.num_blocks[:group], num_blocks, *after.num_blocks[group + 1 :])

    def admit(self, admission: Admission) -> None:
        """The slot takes a sequence."""
        self._touched[admission.slot] = SlotAfter(
            incarnation=admission.incarnation,
            next_position=admission.replay_start,
            replay_end=admission.num_settled_tokens,
            history_len=len(admission.token_ids),
            num_blocks=tuple(len(table) for table in admission.tables),
            hole_position=NO_HOLE,
        )

    def _touch(self, slot: int) -> SlotAfter:
        after = self.after(slot)
        self._touched[slot] = after
        return after
