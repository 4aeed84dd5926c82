"""What `bench throughput` and `bench serve` measure: a stack or server of ours, or a peer behind a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stepahead.cli.bench_drive import Drive, drive
from stepahead.cli.bench_processes import ResourceWatch
from stepahead.cli.bench_server import StepFigures, step_figures, watched_steps, workers_of
from stepahead.cli.bench_workload import Workload

OURS = "stepahead"


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One workload on one system."""

    duration_s: float
    """From the start to the last token."""
    token_times_s: list[list[float]]
    """Per request, the times of its tokens, counted from when it was due."""
    peak_bytes: int
    """Resident memory of the system's processes at its peak; 0: unknown."""
    steps: StepFigures | None = None
    """Only ours tells."""
    running_share: float | None = None
    """Boundaries at which another step was running; only ours tells."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens, prompt processing included."""
        return sum(map(len, self.token_times_s)) / self.duration_s


class System(Protocol):
    """Something that answers requests."""

    @property
    def name(self) -> str:
        """As the tables show it."""
        ...

    @property
    def pids(self) -> Sequence[int]:
        """Roots of its processes; empty where they are not ours to look at."""
        ...

    @property
    def open_loop(self) -> bool:
        """Whether requests may come while others run."""
        ...

    async def run(self, workload: Workload) -> TimedRun:
        """Runs the workload once."""
        ...


class OwnSystem:
    """A scheduler of ours.

    Args:
        address: where it listens.
        pids: its processes and its workers'; empty where they are not ours to look at.
        multiplexed: one Multiplex stream for all requests, or a Generate stream each.
    """

    name = OURS
    open_loop = True

    def __init__(self, address: str, pids: Sequence[int], *, multiplexed: bool) -> None:
        self._address = address
        self.pids = tuple(pids)
        self._multiplexed = multiplexed

    async def run(self, workload: Workload) -> TimedRun:
        """See `System.run`."""
        before = await workers_of(self._address)
        async with ResourceWatch(self.pids) as used:
            done = await drive(self._address, workload.requests(), multiplexed=self._multiplexed)
        steps = await watched_steps(self._address, before)
        return TimedRun(
            duration_s=done.duration_s,
            token_times_s=_times(done),
            peak_bytes=used.peak_bytes,
            steps=step_figures(steps.records),
            running_share=steps.running_share,
        )


def _times(done: Drive) -> list[list[float]]:
    return [[at - answer.due_s for at, count in answer.arrivals for _ in range(count)] for answer in done.answers]
