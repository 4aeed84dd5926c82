"""Deliberate breakages of window groups, mostly without the invariant checker; see mutations.py."""

# pyright: reportPrivateUsage=false
# A mutation replaces private functions; that is its purpose.

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from stepahead.scheduler.core.ids import BlockKey
from stepahead.scheduler.core.prefix import Prefix
from stepahead.scheduler.core.scheduler import Scheduler
from stepahead.scheduler.core.sequence import Stay
from stepahead.scheduler.core.window_groups import LaneWindows, WindowGroup
from stepahead.scheduler.core.window_table import WindowTable
from tests.simulation import world


def _check_nothing(scheduler: Scheduler) -> None:
    """Stands for the invariant checker."""


def drop_a_position_early(patch: pytest.MonkeyPatch) -> None:
    """A window of W - 1 (N1 off by one)."""
    patch.setattr(world, "check_invariants", _check_nothing)
    patch.setattr(
        WindowGroup,
        "num_needless",
        lambda group, num_settled: max(0, num_settled - group.window + 2) // group.block_size,
    )


def drop_by_what_is_dispatched(patch: pytest.MonkeyPatch) -> None:
    """The optimistic cursor decides (N1, BL-02)."""
    settle, fit = LaneWindows.settle, LaneWindows.fit

    def drop(windows: LaneWindows, stay: Stay) -> None:
        for group, table in zip(windows.groups, stay.windows, strict=True):
            group.drop(table, stay.num_dispatched)

    def mutant_settle(windows: LaneWindows, stays: Iterable[Stay]) -> None:
        stays = list(stays)
        for stay in stays:
            drop(windows, stay)
        settle(windows, stays)

    def mutant_fit(windows: LaneWindows, stay: Stay, count: int, *, may_reserve: bool) -> int:
        drop(windows, stay)
        return fit(windows, stay, count, may_reserve=may_reserve)

    patch.setattr(world, "check_invariants", _check_nothing)
    patch.setattr(LaneWindows, "settle", mutant_settle)
    patch.setattr(LaneWindows, "fit", mutant_fit)


def charge_a_block_too_few(patch: pytest.MonkeyPatch) -> None:
    """Admission charges less than execution takes (N11)."""
    charge = WindowGroup.charge
    patch.setattr(WindowGroup, "charge", lambda group, num_blocks: max(1, charge(group, num_blocks) - 2))


def hit_without_the_window(patch: pytest.MonkeyPatch) -> None:
    """A prefix counts as known although the window before its end is not there (N12)."""

    def mutant(windows: LaneWindows, keys: Sequence[BlockKey], num_known: int) -> int:
        found = [
            len([key for key in keys[:num_known] if group.pool.get(key) is not None]) for group in windows.groups
        ]
        return min(found)

    def open_tables(windows: LaneWindows, prefix: Prefix, num_blocks: int) -> list[WindowTable]:
        tables = original(windows, prefix, num_blocks)
        num_cached = len(prefix.keys)
        for group, table in zip(windows.groups, tables, strict=True):
            missing = num_cached - table.end
            group.num_reserved += missing
            table.num_reserved += missing
            group.grow(table, num_cached)
        return tables

    original = LaneWindows.open_tables
    patch.setattr(world, "check_invariants", _check_nothing)
    patch.setattr(LaneWindows, "longest_hit", mutant)
    patch.setattr(LaneWindows, "open_tables", open_tables)


def keep_the_keys_of_poisoned_blocks(patch: pytest.MonkeyPatch) -> None:
    """What a failed row wrote to window layers may be shared (H3)."""
    patch.setattr(LaneWindows, "distrust", lambda windows, keys: None)
