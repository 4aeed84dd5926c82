"""The host's memory: what is left of it, and giving back what this process no longer uses."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def available_memory_bytes() -> int:
    """Memory this process could still use: the machine's, and its control group's limit where there is one."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except OSError:  # no control groups, or version 1
        return available
    return available if limit == "max" else min(available, max(int(limit) - used, 0))


def release_unused_memory() -> None:
    """Gives freed memory back to the system, where the C library keeps it (glibc).

    Reading a model frees a hundred MiB and more of small and middle-sized pieces, which glibc otherwise keeps for
    ever in the arena of the thread that read it. Takes some 50 ms.
    """
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
