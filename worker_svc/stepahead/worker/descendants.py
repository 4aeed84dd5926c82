"""Ends the processes that this one has started, and theirs: compilers, for example."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_PROC = Path("/proc")
_PARENT_FIELD = 1  # of `stat`, counted behind the name in parentheses: state, parent, ...


def kill_descendants() -> None:
    """Kills them, each before those that it started: it starts no more. Without /proc (not Linux) it kills none."""
    children: dict[int, list[int]] = {}
    for stat in _PROC.glob("[0-9]*/stat"):
        # It may end while we look.
        with contextlib.suppress(OSError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[_PARENT_FIELD]), []).append(int(stat.parent.name))
    left = children.get(os.getpid(), [])
    while left:
        process = left.pop()
        left += children.get(process, [])
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
