"""The one waiting queue of all lanes: who should get the next place.

A queue is made of lines. Within a line it is first come, first served, and a preempted sequence stands at its
old place. The ordering says what a line is and how lines take turns:

    fcfs      one line
    priority  a line per priority; the higher goes first, but who waits is promoted by one level for every
              `ageing_admissions` admissions of others, so that nobody starves
    fair      a line per tenant; the tenant that has been served least goes first (fair_share.py)
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator

from stepahead.scheduler.core.config import Ordering
from stepahead.scheduler.core.fair_share import FairShare
from stepahead.scheduler.core.ids import RequestKey
from stepahead.scheduler.core.request import RequestStatus
from stepahead.scheduler.core.sequence import Sequence


def _by_arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Line:
    """First come, first served.

    front  | preempted, by arrival | never admitted, by arrival |  back
    """

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


class WaitingQueue:
    """Sequences that wait for a place, iterated in the order in which they should get one."""

    __slots__ = ("_ageing_admissions", "_lines", "_num_admissions", "_num_waiting", "_ordering", "_shares")

    def __init__(self, ordering: Ordering, *, ageing_admissions: int, shares: FairShare) -> None:
        self._ordering = ordering
        self._ageing_admissions = ageing_admissions
        self._shares = shares
        self._lines: dict[Hashable, Line] = {}
        self._num_waiting = 0
        self._num_admissions = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        if self._ordering is Ordering.FAIR:
            return self._by_share()
        if len(self._lines) == 1:
            return iter(next(iter(self._lines.values())))
        return heapq.merge(*self._lines.values(), key=self._rank)

    def _line_of(self, sequence: Sequence) -> Hashable:
        if self._ordering is Ordering.PRIORITY:
            return sequence.request.priority
        return sequence.request.tenant if self._ordering is Ordering.FAIR else None

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        """Smaller goes first. Within a line it grows with arrival, so lines can be merged."""
        age = (self._num_admissions - sequence.queued_at) // self._ageing_admissions
        return (-sequence.request.priority - age, sequence.arrival)

    def _by_share(self) -> Iterator[Sequence]:
        """One sequence after another of whoever would be served least, counting what was handed out here."""
        lines = {str(tenant): iter(line) for tenant, line in self._lines.items()}
        heap = [(self._shares.served(tenant), tenant) for tenant in lines]
        heapq.heapify(heap)
        while heap:
            served, tenant = heapq.heappop(heap)
            sequence = next(lines[tenant], None)
            if sequence is not None:
                yield sequence
                heapq.heappush(heap, (served + self._shares.admission_cost(sequence), tenant))

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence to its line; a preempted one keeps its age."""
        if sequence.status is RequestStatus.WAITING:
            sequence.queued_at = self._num_admissions
        self._lines.setdefault(self._line_of(sequence), Line()).push(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out."""
        name = self._line_of(sequence)
        line = self._lines[name]
        line.remove(sequence)
        self._num_waiting -= 1
        if not line:
            del self._lines[name]

    def note_admission(self) -> None:
        """Somebody got a place: everybody else is a little older."""
        self._num_admissions += 1
