"""Layers that see a sliding window: block tables that lose their front, and pools of their own.

Theory of operation. A query at position p of a group with window W reads the keys p - W + 1 .. p. Every row that
is dispatched and not committed, and every later one, feeds positions from P (settled) on, so nobody needs block b
any more once (b + 1) * B <= P - W + 1 (rule N1; going by the optimistic S would give away what a step in flight
still reads). Its entry becomes null and it returns to its pool at once: whatever could read it has completed, and
completion is the only fence.

    window 6, blocks of 4                     P           S
    positions    0 1 2 3 | 4 5 6 7 | 8 9 10 11| 12 13 14 15 | 16 ..
    table          null  |    7    |     2    |      9      |  (5, when a row needs it)
                            ^ P - W + 1 = 5

Rows look at positions, not at P: a worker hides what lies before a row's own window, which is never less than what
was dropped. So nothing is sent when a block is dropped.

Who may take how much. Unlike the blocks of layers that see everything, these are not taken for a whole history at
admission: a prompt may be longer than the pool. Instead each stay *reserves* what it can need at once, with D + 1
tokens in flight (rule N11),

    charge(n) = min(n, ceil((W - 1 + D + 1) / B) + 1)           n: blocks of its history

and tables grow as rows need them, never past the reservation. All reservations fit the pool together, whoever
shares blocks with whom, so a stay that was admitted always gets what it reserved: its oldest block comes back as it
goes on, and nobody is stranded in the middle of a prompt. A chunk that wants more in flight reserves more while
there is any and gives it back as it settles; where there is none, the chunk is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepahead.scheduler.core.block_pool import BlockPool
from stepahead.scheduler.core.config import LaneConfig, WindowPool
from stepahead.scheduler.core.ids import BlockId, BlockKey
from stepahead.scheduler.core.prefix import Prefix
from stepahead.scheduler.core.sequence import Stay
from stepahead.scheduler.core.window_table import WindowTable


class WindowGroup:
    """The pool of one group, and what is reserved of it."""

    __slots__ = ("_most_blocks", "block_size", "num_reserved", "pool", "window")

    def __init__(self, config: WindowPool, block_size: int, overlap_depth: int) -> None:
        self.window = config.window
        self.block_size = block_size
        self.pool = BlockPool(config.num_blocks)
        self.num_reserved = 0
        """Blocks that all stays together may hold: those that run, and those behind a fence."""
        self._most_blocks = config.most_blocks(block_size, overlap_depth)

    @property
    def num_unreserved(self) -> int:
        """Blocks that may still be promised."""
        return self.pool.num_total - self.num_reserved

    def charge(self, num_blocks: int) -> int:
        """Blocks that a sequence of `num_blocks` blocks holds at once, at most, if it goes token by token."""
        return min(num_blocks, self._most_blocks)

    def num_needless(self, num_settled: int) -> int:
        """Blocks at the front of a table that no row reads any more (rule N1)."""
        return max(0, num_settled - self.window + 1) // self.block_size

    def drop(self, table: WindowTable, num_settled: int) -> None:
        """Entries that no row reads any more become null; their blocks are free, or idle with a key."""
        dropped = table.drop(self.num_needless(num_settled) - table.num_null)
        if dropped:
            self.pool.quarantine(dropped)
            self.pool.release(dropped)

    def relax(self, table: WindowTable, charge: int) -> int:
        """Gives back what is reserved beyond the charge and not held; returns how many blocks that is."""
        surplus = max(0, table.num_reserved - max(charge, len(table.block_ids)))
        table.num_reserved -= surplus
        self.num_reserved -= surplus
        return surplus

    def reserve(self, table: WindowTable, end: int) -> None:
        """Reserves for blocks up to the `end`-th, as far as there are any."""
        more = min(end - table.num_null - table.num_reserved, self.num_unreserved)
        if more > 0:
            table.num_reserved += more
            self.num_reserved += more

    def grow(self, table: WindowTable, end: int) -> list[BlockId]:
        """Takes the blocks up to the `end`-th, which must be reserved."""
        assert end - table.num_null <= table.num_reserved, "N11: more blocks than the admission was charged"
        block_ids = self.pool.take(end - table.end) if end > table.end else []
        assert block_ids is not None, "N11: a reserved block is not there"
        table.block_ids += block_ids
        return block_ids


class LaneWindows:
    """The window groups of a lane and what they mean for its stays."""

    __slots__ = ("_first_group", "_num_given_back", "groups")

    def __init__(self, config: LaneConfig, overlap_depth: int) -> None:
        self.groups = [WindowGroup(each, config.block_size, overlap_depth) for each in config.windows]
        self._first_group = 1 if config.num_blocks else 0
        """The number of the first window group on the wire: behind the layers that see everything."""
        self._num_given_back = 0

    def take_given_back(self) -> int:
        """Blocks that were reserved and are not any more, since the last call: somebody may find a place now."""
        given_back, self._num_given_back = self._num_given_back, 0
        return given_back

    def rooms_left(self, num_blocks: int) -> list[tuple[int, int]]:
        """Of each group: blocks that could still be reserved behind a history of `num_blocks`, and all it has."""
        return [(group.num_unreserved - group.charge(num_blocks), group.pool.num_total) for group in self.groups]

    def longest_hit(self, keys: Sequence[BlockKey], num_known: int) -> int:
        """How many of the first `num_known` blocks a newcomer may skip: the windows before their end must be there.

        A run of the last W - 1 positions is enough, whatever has become of the ones before (rule N12).
        """
        longest = 0
        runs = [0] * len(self.groups)
        for index, key in enumerate(keys[:num_known], start=1):
            usable = True
            for number, group in enumerate(self.groups):
                runs[number] = runs[number] + 1 if group.pool.get(key) is not None else 0
                usable = usable and runs[number] >= index - group.num_needless(index * group.block_size)
            if usable:
                longest = index
        return longest

    def open_tables(self, prefix: Prefix, num_blocks: int) -> list[WindowTable]:
        """Tables of a newcomer, reservations included. In front of a replay there is nothing."""
        tables: list[WindowTable] = []
        for group in self.groups:
            if prefix.replay is None:
                num_null = group.num_needless(len(prefix.keys) * group.block_size)
                cached = group.pool.find(prefix.keys[num_null:])
            else:
                num_null, cached = prefix.replay.start // group.block_size, []
            group.pool.share(cached)
            tables.append(WindowTable(num_null, cached, group.charge(num_blocks)))
            group.num_reserved += group.charge(num_blocks)
        return tables

    def fit(self, stay: Stay, count: int, *, may_reserve: bool) -> int:
        """How many of the next `count` positions the stay's tables can be made to hold; 0: it must settle first."""
        size = stay.block_size
        for group, table in zip(self.groups, stay.windows, strict=True):
            group.drop(table, stay.num_settled)
            self._num_given_back += group.relax(table, group.charge(stay.num_blocks))
            if may_reserve:
                group.reserve(table, -(-(stay.num_dispatched + count) // size))
            count = min(count, (table.num_null + table.num_reserved) * size - stay.num_dispatched)
        return count

    def grow(self, stay: Stay, num_tokens: int) -> list[tuple[int, BlockId]]:
        """Extends the tables over the first `num_tokens` positions: (group, block) of each new entry."""
        end = -(-num_tokens // stay.block_size)
        added: list[tuple[int, BlockId]] = []
        for number, (group, table) in enumerate(zip(self.groups, stay.windows, strict=True), self._first_group):
            added += [(number, block_id) for block_id in group.grow(table, end)]
        return added

    def reserve_next(self, stays: list[Stay]) -> bool:
        """Reserves a block more for each of some stays at the end of their tables; False: there are too few."""
        shares = [(group, [stay.windows[index] for stay in stays]) for index, group in enumerate(self.groups)]
        self.settle(stays)
        for group, tables in shares:
            missing = sum(len(table.block_ids) + 1 > table.num_reserved for table in tables)
            if missing > group.num_unreserved:
                return False
        for group, tables in shares:
            for table in tables:
                group.reserve(table, table.end + 1)
        return True

    def settle(self, stays: Iterable[Stay]) -> None:
        """Returns blocks that left a window, and reservations that are not needed any more."""
        for stay in stays:
            for group, table in zip(self.groups, stay.windows, strict=True):
                group.drop(table, stay.num_settled)
                self._num_given_back += group.relax(table, group.charge(stay.num_blocks))

    def num_returning(self, running: list[Stay]) -> int | None:
        """Blocks that come back without taking anybody's place, of the group that lacks most; None: none lacks."""
        returning: list[int] = []
        for index, group in enumerate(self.groups):
            if not group.num_unreserved:
                kept = (min(stay.windows[index].num_reserved, group.charge(stay.num_blocks)) for stay in running)
                returning.append(group.num_reserved - sum(kept))
        return min(returning, default=None)

    def publish(self, stay: Stay, keys: Sequence[BlockKey], first: int) -> None:
        """Blocks from the `first`-th on become visible under their keys, where they have not been dropped.

        Behind the start of an exact replay those are visible that are exact in every layer.
        """
        for group, table in zip(self.groups, stay.windows, strict=True):
            if stay.replay is not None:
                first = -(-stay.replay.first_exact(group.window) // group.block_size)
            for index in range(max(first, table.num_null), min(len(keys), table.end)):
                group.pool.publish(table.block_ids[index - table.num_null], keys[index])

    def distrust(self, keys: Iterable[BlockKey]) -> None:
        """Nobody may share blocks of these keys, those that were dropped included."""
        for group in self.groups:
            group.pool.forget_keys(keys)

    def quarantine(self, stay: Stay) -> None:
        """The stay has retired; its fence has not passed."""
        for group, table in zip(self.groups, stay.windows, strict=True):
            group.pool.quarantine(table.block_ids)

    def close(self, stay: Stay) -> None:
        """The fence of a retired stay has passed."""
        for group, table in zip(self.groups, stay.windows, strict=True):
            group.pool.release(table.block_ids)
            group.num_reserved -= table.num_reserved
        stay.windows = []
