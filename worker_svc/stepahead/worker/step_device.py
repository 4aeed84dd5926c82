"""Runs steps on the device stream and reads the step clock where it is true: on the stream.

`running_step_id`, `queued_steps` and `gap_ns` of a boundary are sampled at the instant its step ended, not when
the message is built: built later they could claim overlap that was not there.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from stepahead.worker.runner import PlansAhead

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepahead.worker.device_stream import Stream
    from stepahead.worker.runner import DeviceTimes, Runner, StepBatch
    from stepahead.worker.step import Step


class StepDevice:
    """A runner behind a stream.

    Args:
        runner: loaded and allocated; only ever called on the stream.
        stream: the device.
        hold_events: a retained step's end waits for `Step.release`, for tables that must not depend on timing.
        single_step: so does the end of every other step.
    """

    def __init__(
        self, runner: Runner, stream: Stream, *, hold_events: bool = False, single_step: bool = False
    ) -> None:
        self._runner = runner
        # A step whose end is held back must not be followed by another one meanwhile.
        self._planner = runner if isinstance(runner, PlansAhead) and not (hold_events or single_step) else None
        self._stream = stream
        self._hold_events = hold_events
        self._single_step = single_step
        self._launched: deque[Step] = deque()  # launched and not ended; both threads, each one end of it
        self._last_end_ns = 0  # 0: no step of this epoch has ended; device thread only
        self._running: Step | None = None

    @property
    def holds_ends(self) -> bool:
        """Whether steps end when they are told to, so that their age says nothing."""
        return self._hold_events or self._single_step

    @property
    def running(self) -> Step | None:
        """The step whose forward has started and whose sampling has not ended, of any epoch."""
        return self._running

    @property
    def oldest_launched(self) -> Step | None:
        """The oldest step that was launched and has not ended."""
        try:
            return self._launched[0]
        except IndexError:  # it may end between a test and the access
            return None

    def launch_forward(self, step: Step, batch: StepBatch, on_forward_end: Callable[[], None] | None) -> None:
        """Launches the forward behind everything launched before.

        Args:
            step: filled by the device.
            batch: its arrays.
            on_forward_end: called on the device thread when the forward has ended.
        """
        step.launched_ns = time.monotonic_ns()
        self._launched.append(step)
        if self._planner is not None:
            self._planner.announce(batch, gated=on_forward_end is not None)

        def forward() -> None:
            step.started_ns = time.monotonic_ns()
            self._running = step  # after its start: the host thread's watchdog counts from it
            self._runner.forward(batch)
            step.forward_ended_ns = time.monotonic_ns()
            if (times := self._own_times()) is not None:
                step.started_ns, step.forward_ended_ns = times.started_ns, times.ended_ns
            step.gap_ns = step.started_ns - self._last_end_ns if self._last_end_ns else 0
            if on_forward_end is not None:
                on_forward_end()

        self._stream.submit(forward)

    def launch_sample(self, step: Step, batch: StepBatch, on_end: Callable[[], None]) -> None:
        """Launches the sampling of a step whose forward was the last thing launched for it.

        Args:
            step: filled by the device.
            batch: its arrays, masks included.
            on_end: called on the device thread when the step has ended.
        """
        step.sample_launched = True

        def sample() -> None:
            step.sample_started_ns = time.monotonic_ns()
            samples = self._runner.sample(batch)
            # Copied: the runner may reuse its buffers for the next step, which starts at once.
            step.samples = replace(samples, token_ids=samples.token_ids.copy(), status=samples.status.copy())
            self._hold(step)
            times = self._own_times()
            if times is not None and times.with_sampling:
                step.sample_started_ns = times.ended_ns
                self._end(step, times.ended_ns, work_follows=True)
            else:
                self._end(step, time.monotonic_ns(), work_follows=True)

        self._stream.submit(sample, on_end)

    def reset(self, worker_epoch: int) -> None:
        """A new epoch: cells are void, and steps of older epochs that were never sampled are forgotten."""

        def forget() -> None:
            self._forget(worker_epoch)
            self._runner.reset()

        if self._planner is not None:
            self._planner.break_off()
        self._stream.submit(forget)

    def _hold(self, step: Step) -> None:
        """Waits until a step whose end is held back may end."""
        if self._single_step or (self._hold_events and not step.in_place):
            step.release.wait()

    def _forget(self, worker_epoch: int) -> None:
        while self._launched and self._launched[0].worker_epoch != worker_epoch:
            self._launched.popleft()
        self._running = None
        self._last_end_ns = 0

    def _own_times(self) -> DeviceTimes | None:
        return None if self._planner is None else self._planner.last_times()

    def _end(self, step: Step, at_ns: int, *, work_follows: bool) -> None:
        """The device has reached the step's end; `work_follows`: what was launched by then is on the device."""
        launched = self._launched
        launched.popleft()
        queued = [later.step_id for later in tuple(launched) if later.launched_ns <= at_ns]
        step.queued_steps = len(queued)
        step.running_step_id = queued[0] if queued and work_follows else 0
        self._running = None
        self._last_end_ns = step.ended_ns = at_ns
