"""The one waiting queue of all lanes: first come, first served, preempted sequences at their old place.

front  | preempted, by arrival | never admitted, by arrival |  back
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from stepahead.scheduler.core.ids import RequestKey
from stepahead.scheduler.core.request import RequestStatus
from stepahead.scheduler.core.sequence import Sequence


def _by_arrival(sequence: Sequence) -> int:
    return sequence.arrival


class WaitingQueue:
    """Sequences that wait for a slot, in the order in which they should get one."""

    __slots__ = ("_fresh", "_preempted")

    def __init__(self) -> None:
        self._preempted: list[Sequence] = []  # by arrival; short, because it was running a moment ago
        self._fresh: OrderedDict[RequestKey, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._fresh.values()

    def push(self, sequence: Sequence) -> None:
        """Adds a new sequence at the back, a preempted one at its place by arrival."""
        if sequence.status is RequestStatus.PREEMPTED:
            insort(self._preempted, sequence, key=_by_arrival)
        else:
            self._fresh[sequence.request.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out."""
        if self._fresh.pop(sequence.request.key, None) is None:
            self._preempted.remove(sequence)
