"""Runs steps on a device that works by itself; the step clock is read where the device is, by its events.

`StepDevice` for a `LaunchStream`: both parts of a step are launched and return at once. `gap_ns` is the device's
own time from the end of a step to the begin of the next one; `running_step_id` and `queued_steps` say what the
device had been given when the end was noticed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from typing_extensions import override

from stepahead.worker.step_device import StepDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepahead.worker.launch_stream import Instant, LaunchStream
    from stepahead.worker.runner import LaunchingRunner, StepBatch, StepSamples
    from stepahead.worker.step import Step


class LaunchedDevice(StepDevice):
    """A runner whose work is launched.

    Args:
        runner: loaded and allocated; called on the stream's launching thread, its results on the telling one.
        stream: the device.
        hold_events: see `StepDevice`; what holds an end back holds the launching thread.
        single_step: see `StepDevice`.
    """

    def __init__(
        self, runner: LaunchingRunner, stream: LaunchStream, *, hold_events: bool = False, single_step: bool = False
    ) -> None:
        super().__init__(runner, stream, hold_events=hold_events, single_step=single_step)
        self._launching_runner = runner
        self._launch_stream = stream

    @override
    def launch_forward(self, step: Step, batch: StepBatch, on_forward_end: Callable[[], None] | None) -> None:
        """See `StepDevice.launch_forward`; `on_forward_end` is called on the telling thread."""
        self._launched.append(step)
        step.launched_ns = time.monotonic_ns()

        def begun(instant: Instant) -> None:
            step.started_ns = instant.at_ns
            # What was told last is the end of the step before.
            step.gap_ns = instant.since_last_ns if self._last_end_ns else 0
            self._running = step  # after its start, as in `StepDevice`

        def ended(instant: Instant) -> None:
            step.forward_ended_ns = instant.at_ns
            if on_forward_end is not None:
                on_forward_end()

        self._launch_stream.launch(lambda: self._runner.forward(batch), on_begin=begun, on_end=ended)

    @override
    def launch_sample(self, step: Step, batch: StepBatch, on_end: Callable[[], None]) -> None:
        """See `StepDevice.launch_sample`; `on_end` is called on the telling thread."""
        step.sample_launched = True
        taken: list[Callable[[], StepSamples]] = []

        def sample() -> None:
            taken.append(self._launching_runner.launch_sample(batch))
            self._hold(step)

        def begun(instant: Instant) -> None:
            step.sample_started_ns = instant.at_ns

        def ended(instant: Instant) -> None:
            step.samples = taken[0]()
            self._end(step, instant.at_ns, work_follows=instant.work_follows)
            on_end()

        self._launch_stream.launch(sample, on_begin=begun, on_end=ended)

    @override
    def reset(self, worker_epoch: int) -> None:
        """See `StepDevice.reset`. Steps are forgotten when the device gets there: older ends come before."""
        self._stream.submit(self._runner.reset, lambda: self._forget(worker_epoch))
