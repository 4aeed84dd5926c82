"""A dispatched step, as the scheduler remembers it until its completion."""

from __future__ import annotations

from stepahead.scheduler.core.decode_rows import DecodeRows
from stepahead.scheduler.core.ids import BlockId, StepId
from stepahead.scheduler.core.sequence import Stay


class StepInFlight:
    """A dispatched step: its rows in plan order, and what its completion gives back."""

    __slots__ = (
        "borrowed",
        "constrained",
        "explicit_rows",
        "fenced",
        "has_dead_rows",
        "incarnations",
        "last_outputs",
        "members",
        "num_tokens",
        "step_id",
    )

    def __init__(self, step_id: StepId, explicit_rows: list[tuple[Stay, int, bool]], members: DecodeRows) -> None:
        self.step_id = step_id
        self.explicit_rows = explicit_rows
        """(stay, positions fed, samples)."""
        self.members = members
        """Each feeds one position and samples."""
        self.incarnations = members.incarnations
        if explicit_rows:
            self.incarnations = [stay.incarnation for stay, _, _ in explicit_rows] + members.incarnations
        self.num_tokens = sum(count for _, count, _ in explicit_rows) + len(members)
        self.constrained: list[tuple[Stay, int]] = []
        """Rows whose sample waits for a mask, and the position each feeds last."""
        self.last_outputs: list[Stay] = []
        """Members whose last possible output this step samples."""
        self.has_dead_rows = False
        """Whether a row's stay was retired after the step was dispatched."""
        self.borrowed: list[BlockId] = []
        """Blocks that the step copies from."""
        self.fenced: list[Stay] = []
        """Retired stays whose slot and blocks come back when this step commits."""

    @property
    def decode_rows(self) -> list[Stay]:
        """The members' stays."""
        return self.members.stays
