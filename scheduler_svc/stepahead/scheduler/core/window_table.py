"""The block table of one stay in a group of layers that see a window."""

from __future__ import annotations

from stepahead.scheduler.core.ids import BlockId


class WindowTable:
    """Null entries, then blocks; see `window_groups.py`."""

    __slots__ = ("block_ids", "num_null", "num_reserved")

    def __init__(self, num_null: int, block_ids: list[BlockId], num_reserved: int) -> None:
        self.num_null = num_null
        self.block_ids = block_ids
        """Of the entries from `num_null` on."""
        self.num_reserved = num_reserved
        """Blocks it may hold."""

    @property
    def end(self) -> int:
        """Entries, null ones included."""
        return self.num_null + len(self.block_ids)

    def drop(self, count: int) -> list[BlockId]:
        """The first `count` entries that are not null become null; returns their blocks."""
        if count <= 0:
            return []
        dropped = self.block_ids[:count]
        del self.block_ids[:count]
        self.num_null += len(dropped)
        return dropped
