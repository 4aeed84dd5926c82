"""Threads that wake the loop are batch threads: the others are left alone."""

from __future__ import annotations

import os
import threading

import pytest

from stepahead.scheduler.calm_threads import starting_calm_threads


def policy_of(thread: threading.Thread) -> int:
    assert thread.native_id is not None
    return os.sched_getscheduler(thread.native_id)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no batch threads on this system")
def test_threads_that_start_inside_are_batch_threads() -> None:
    end = threading.Event()
    before, inside, after = (threading.Thread(target=end.wait) for _ in range(3))
    try:
        before.start()
        with starting_calm_threads():
            inside.start()
        after.start()
        policies = [policy_of(thread) for thread in (before, inside, after)]
    finally:
        end.set()
    assert policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]
