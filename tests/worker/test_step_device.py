"""What the host thread may read of a step while the device thread runs it."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest

from stepahead.worker import step_device
from stepahead.worker.runner import StepBatch, StepSamples
from stepahead.worker.step import Step
from stepahead.worker.step_device import StepDevice


class InlineStream:
    """Runs what it is given at once."""

    def submit(self, work: Any, on_end: Any = None) -> None:
        work()
        if on_end is not None:
            on_end()


class Nothing:
    """A runner that computes nothing."""

    def forward(self, batch: StepBatch) -> None:
        pass

    def sample(self, batch: StepBatch) -> StepSamples:
        return StepSamples(np.array([7]), np.zeros(1, np.uint8))


def test_a_running_step_always_has_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog may look between any two lines: a step without a start would have run since the machine's."""
    device = StepDevice(cast("Any", Nothing()), cast("Any", InlineStream()))
    seen: list[bool] = []

    class Clock:
        @staticmethod
        def monotonic_ns() -> int:
            if device.running is not None:
                seen.append(device.running.started_ns > 0)
            return time.monotonic_ns()

    monkeypatch.setattr(step_device, "time", Clock)
    step = Step(
        step_id=1, worker_epoch=1, in_place=False, batch=None, rows=None, gate=None,
        gate_wait_ns=0, max_step_ns=10**9, read_ns=0,
    )  # fmt: skip
    batch = cast("StepBatch", None)
    device.launch_forward(step, batch, None)
    device.launch_sample(step, batch, lambda: None)
    assert seen
    assert all(seen)
    assert device.running is None
