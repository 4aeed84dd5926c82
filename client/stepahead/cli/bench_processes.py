"""What processes of this machine use, read from /proc: CPU time and resident memory, children included."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Generator, Sequence
from pathlib import Path

_PROC = Path("/proc")
INTERVAL_S = 0.1
IDLE_CORES = 0.1
"""Fewer cores than this in use: a tree of processes has come to rest."""
_LOOK_S = 0.3  # some 30 ticks of the kernel's clock
_REST_WITHIN_S = 10.0
NICENESS = 10
"""Of a client that shares cores with the servers it measures."""
LEAST_NICENESS = 19
_SESSION = _PROC / "self" / "autogroup"
_WEIGH_WITHIN_S = 1.0


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants that live now; empty where it has ended, or where there is no /proc."""
    tree: list[int] = []
    found = [pid]
    while found:
        each = found.pop()
        try:
            tasks = list((_PROC / str(each) / "task").iterdir())
            for task in tasks:
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # it ended while it was looked at
        tree.append(each)
    return tree


def cpu_s(pid: int) -> float:
    """CPU seconds that the tree has used so far."""
    ticks = 0
    for each in process_tree(pid):
        try:
            # The name, in parentheses, may hold blanks; user and system time are the 14th and 15th field.
            fields = (_PROC / str(each) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of the tree; pages that processes share count once for each."""
    pages = 0
    for each in process_tree(pid):
        try:
            pages += int((_PROC / str(each) / "statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine_busy_s() -> float:
    """CPU seconds that all cores have been busy since the machine started; what the host took counts as busy.

    0 where there is no /proc.
    """
    try:
        first = (_PROC / "stat").read_text().splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def yield_cores() -> None:
    """Lets every other process go first from now on: this one's threads never preempt them, and weigh less.

    All threads: niceness is a thread's own on Linux, and those of gRPC run already.
    """
    for thread in _threads_of_ours():
        # A thread may end meanwhile, and a sandbox may forbid it: then the figures are those of a rude client.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
            if hasattr(os, "SCHED_BATCH"):
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def yielding_session() -> Generator[None]:
    """Lets processes of other sessions go first meanwhile: for who measures servers with sessions of their own.

    Where Linux weighs whole sessions (autogroup), niceness counts among the threads of one only, and `yield_cores`
    yields to nobody. The rest of the terminal's session yields as well. Elsewhere nothing happens.
    """
    before = _session_niceness()
    if before is not None:
        _weigh_session(LEAST_NICENESS)
    try:
        yield
    finally:
        if before is not None:
            _weigh_session(before)


def _session_niceness() -> int | None:
    """As Linux writes it: `/autogroup-25 nice 0`; None where sessions do not count."""
    try:
        return int(_SESSION.read_text().split()[-1])
    except (OSError, IndexError):
        return None


def _weigh_session(niceness: int) -> None:
    """Tries again where it is too early: Linux lets users do it once in 0.1 s, all of them together."""
    give_up_s = time.monotonic() + _WEIGH_WITHIN_S
    with contextlib.suppress(OSError):  # a sandbox may forbid it: then the figures are those of a rude client
        while True:
            try:
                _SESSION.write_text(str(niceness))
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(_WEIGH_WITHIN_S / 20)
            else:
                return


def _threads_of_ours() -> list[int]:
    try:
        return [int(task.name) for task in (_PROC / "self" / "task").iterdir()]
    except OSError:
        return [0]  # no /proc: the process


async def until_idle(pids: Sequence[int]) -> None:
    """Waits until trees of processes have come to rest, at most ten seconds, and a moment at least.

    An engine may go on looking for work for a second after its last token, on a whole core.

    Args:
        pids: the roots.
    """
    give_up_s = time.monotonic() + _REST_WITHIN_S
    while True:
        used_before_s, before_s = sum(map(cpu_s, pids)), time.monotonic()
        await asyncio.sleep(_LOOK_S)
        now_s = time.monotonic()
        if (sum(map(cpu_s, pids)) - used_before_s) / (now_s - before_s) < IDLE_CORES or now_s > give_up_s:
            return


class ForeignCpu:
    """CPU time of everything but this process and what is measured, from its construction on.

    Args:
        measured: the roots of what is measured, with their descendants. Another system that is compared, at rest
            meanwhile, is foreign.
    """

    def __init__(self, measured: Sequence[int]) -> None:
        self._measured = tuple(measured)
        self._start = self._now()

    def share(self) -> float:
        """Of all cores' time so far, 0 to 1; a few hundredths either way are the clocks' grain."""
        at_s, foreign_s = self._now()
        begun_s, foreign_before_s = self._start
        cores_s = (at_s - begun_s) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, foreign_s - foreign_before_s) / cores_s) if cores_s else 0.0

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), machine_busy_s() - time.process_time() - sum(map(cpu_s, self._measured))


class ResourceWatch:
    """Samples trees of processes while a load runs. An async context manager; read it afterwards.

    Args:
        pids: the roots; their figures are added up.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        self.before_bytes = 0
        self.peak_bytes = 0
        self.after_bytes = 0
        self.used_cpu_s = 0.0
        self._cpu_before_s = 0.0
        self._sampling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ResourceWatch:
        self.before_bytes = self.peak_bytes = self._resident()
        self._cpu_before_s = sum(map(cpu_s, self._pids))
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._sampling is not None
        self._sampling.cancel()
        self.used_cpu_s = sum(map(cpu_s, self._pids)) - self._cpu_before_s
        self.after_bytes = self._resident()
        self.peak_bytes = max(self.peak_bytes, self.after_bytes)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.peak_bytes = max(self.peak_bytes, self._resident())

    def _resident(self) -> int:
        return sum(map(resident_bytes, self._pids))
