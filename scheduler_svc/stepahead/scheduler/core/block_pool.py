"""Blocks and slots: who holds what, and when it may be given away again.

Theory of operation. Completion is the only fence. A resource that a dispatched step names (a KV block, a slot)
may still be read or written by the device until that step completes, whatever became of the request meanwhile.
So a resource is in exactly one state, and the counts of the states always sum to the pool (rule E4):

    free         may be given out now
    owned        in the block table (or the slot) of a live stay; a block may have several owners
    quarantined  its last owner retired at commit c, the newest dispatched step that names it is f > c:
                 it comes back when f commits
    idle         blocks only: nobody's, but its content is known by a key and may be shared again; the
                 longest unused one is evicted when no block is free

    step            c ........ c+1 = f ..... f commits
    owner           | request A | quarantine | free, or idle with a key | request B
    device access   |<----- may happen ----->|

The pools know nothing of steps: the lane attaches retired stays to their fence and calls `release`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from stepahead.scheduler.core.ids import BlockId, BlockKey

ResourceT = TypeVar("ResourceT", bound=int)


class FencedPool(Generic[ResourceT]):
    """A pool of numbered resources with a quarantine. First freed is first given out."""

    __slots__ = ("_free", "num_owned", "num_quarantined", "num_total")

    def __init__(self, resources: Iterable[ResourceT]) -> None:
        self._free: deque[ResourceT] = deque(resources)
        self.num_total = len(self._free)
        self.num_owned = 0
        self.num_quarantined = 0

    @property
    def num_free(self) -> int:
        """Resources that may be given out now."""
        return len(self._free)

    def take(self, count: int) -> list[ResourceT] | None:
        """Gives out `count` resources, or None (and nothing) if fewer are free."""
        if count > len(self._free):
            return None
        self.num_owned += count
        return [self._free.popleft() for _ in range(count)]

    def quarantine(self, count: int) -> None:
        """Owned resources whose fence has not passed."""
        assert count <= self.num_owned, "quarantined more than is owned"
        self.num_owned -= count
        self.num_quarantined += count

    def release(self, resources: Iterable[ResourceT]) -> None:
        """Quarantined resources whose fence has passed become free, in the given order."""
        before = len(self._free)
        self._free.extend(resources)
        self.num_quarantined -= len(self._free) - before
        assert self.num_quarantined >= 0, "released more than was quarantined"

    def free_ids(self) -> tuple[ResourceT, ...]:
        """For invariant checks: the free resources in the order they will be given out."""
        return tuple(self._free)


class BlockPool:
    """The KV blocks of a lane, with owners, fences and keys.

    A key names the content of a full, settled block and of everything before it (`prefix_cache.py`). Only such a
    block is ever shared, and nobody writes to it again, so an old owner's rows in flight do not matter to a new
    one.
    """

    __slots__ = (
        "_by_key",
        "_fenced",
        "_free",
        "_idle",
        "_key_of",
        "_owners",
        "num_evictions",
        "num_owned",
        "num_quarantined",
        "num_total",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_total = num_blocks
        self.num_owned = 0
        self.num_quarantined = 0
        self.num_evictions = 0
        self._free = deque(BlockId(index) for index in range(num_blocks))
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # first is evicted first
        self._owners = [0] * num_blocks
        self._fenced = [0] * num_blocks  # retired owners whose fence has not passed
        self._key_of: dict[BlockId, BlockKey] = {}
        self._by_key: dict[BlockKey, BlockId] = {}

    @property
    def num_free(self) -> int:
        """Blocks without owner and without key."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks without owner whose content may be shared again."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give out."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[BlockId] | None:
        """Gives out `count` blocks with unknown content, or None (and nothing) if fewer are available."""
        if count > self.num_available:
            return None
        block_ids: list[BlockId] = []
        for _ in range(count):
            if self._free:
                block_id = self._free.popleft()
            else:
                block_id, _ = self._idle.popitem(last=False)
                self.forget(block_id)
                self.num_evictions += 1
            self._owners[block_id] = 1
            block_ids.append(block_id)
        self.num_owned += count
        return block_ids

    def find(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """The blocks that hold the longest known run from the first key on."""
        found: list[BlockId] = []
        for key in keys:
            block_id = self._by_key.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def get(self, key: BlockKey) -> BlockId | None:
        """The block of a key, if it is known."""
        return self._by_key.get(key)

    def num_idle_among(self, block_ids: Iterable[BlockId]) -> int:
        """How many of them `take` counts as available."""
        return sum(block_id in self._idle for block_id in block_ids)

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Adds an owner to blocks that `find` returned."""
        for block_id in block_ids:
            if self._owners[block_id] == 0:
                self.num_owned += 1
                if self._fenced[block_id]:
                    self.num_quarantined -= 1
                else:
                    del self._idle[block_id]
            self._owners[block_id] += 1

    def quarantine(self, block_ids: Iterable[BlockId]) -> None:
        """An owner has retired; its fence has not passed."""
        for block_id in block_ids:
            self._owners[block_id] -= 1
            self._fenced[block_id] += 1
            if self._owners[block_id] == 0:
                self.num_owned -= 1
                self.num_quarantined += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """The fence of a retired owner has passed. Of a stay's blocks the last ones are evicted first (E12)."""
        idle: list[BlockId] = []
        for block_id in block_ids:
            self._fenced[block_id] -= 1
            if self._owners[block_id] or self._fenced[block_id]:
                continue
            self.num_quarantined -= 1
            if block_id in self._key_of:
                idle.append(block_id)
            else:
                self._free.append(block_id)
        self._idle.update(dict.fromkeys(reversed(idle)))
        assert self.num_quarantined >= 0, "released more than was quarantined"

    def publish(self, block_id: BlockId, key: BlockKey) -> None:
        """The block's content is settled and known. The first block of a key keeps it."""
        if key not in self._by_key and block_id not in self._key_of:
            self._by_key[key] = block_id
            self._key_of[block_id] = key

    def forget(self, block_id: BlockId) -> None:
        """The content of a block that is not idle must not be shared any more."""
        assert block_id not in self._idle, "an idle block is nobody's to forget"
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._by_key[key]

    def forget_keys(self, keys: Iterable[BlockKey]) -> None:
        """The content of blocks, whoever has them, must not be shared any more; idle ones become free."""
        for key in keys:
            block_id = self._by_key.pop(key, None)
            if block_id is None:
                continue
            del self._key_of[block_id]
            if block_id in self._idle:
                del self._idle[block_id]
                self._free.append(block_id)

    def state_of(self, block_id: BlockId) -> tuple[int, int]:
        """For invariant checks: live owners, retired owners behind a fence."""
        return self._owners[block_id], self._fenced[block_id]

    def is_known(self, block_id: BlockId) -> bool:
        """For invariant checks: whether the block's content may be shared."""
        return block_id in self._key_of

    def free_ids(self) -> tuple[BlockId, ...]:
        """For invariant checks: free blocks in the order they will be given out."""
        return tuple(self._free)

    def idle_ids(self) -> tuple[BlockId, ...]:
        """For invariant checks: idle blocks in the order they will be evicted."""
        return tuple(self._idle)
