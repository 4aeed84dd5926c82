"""Blocks and slots: who holds what, and when it may be given away again.

Theory of operation. Completion is the only fence. A resource that a dispatched step names (a KV block, a slot)
may still be read or written by the device until that step completes, whatever became of the request meanwhile.
So a resource is in exactly one of three places, and their counts always sum to the pool (rule E4):

    free         may be given out now
    owned        in the block table (or the slot) of a live incarnation
    quarantined  its incarnation ended at step commit c, the newest dispatched step that names it is f > c:
                 it comes back when f commits

    step            c ........ c+1 = f ..... f commits
    owner           | request A | quarantine | free | request B
    device access   |<----- may happen ----->|

The pool knows nothing of steps: the lane attaches quarantined resources to their fence and calls `release`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

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
