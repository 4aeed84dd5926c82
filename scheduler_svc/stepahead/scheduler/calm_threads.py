"""Threads that help the event loop must not take its core.

grpc.aio completes every operation on a thread of its own, which does nothing but wake the loop. Waking it costs the
loop its core each time: it is preempted in the middle of a slice of messages, once per message. A batch thread runs
when the loop sleeps, or on another core, and then for many completions at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator


@contextlib.contextmanager
def starting_calm_threads() -> Generator[None]:
    """Threads that Python starts inside do not preempt others when they wake. Linux only; elsewhere as ever."""
    before = set(threading.enumerate())
    yield
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in set(threading.enumerate()) - before:
        if thread.native_id is not None:
            with contextlib.suppress(OSError):  # a sandbox may forbid it; it is no more than a speed-up
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
