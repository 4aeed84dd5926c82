"""The executor's round: which step is launched, sampled and settled next.

    round of plan N:  (1) launch forward(N)
                      (2) settle the retained step N-1: its boundary leaves
                      (3) launch sample(N), constrained rows once their gate is there or overdue
                      (4) COMPLETE_IN_PLACE: settle N before the next round; RETAIN: keep N

Nothing here blocks. `advance` goes as far as commands and events allow and is called after each of them, so a
retained step is settled when its event fires, whether or not another plan is there, and a gate that is waited
for holds back neither boundaries nor answers.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from stepahead.worker.commands import ForwardEnded, StepEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepahead.worker.commands import Command
    from stepahead.worker.runner import StepBatch
    from stepahead.worker.step import Step
    from stepahead.worker.step_device import StepDevice


class StepRound:
    """State of the steps in flight of one epoch; host thread only.

    Args:
        device: runs the steps.
        post: puts an event into the executor's inbox; called on the device thread.
        settle: told about each step, in order, once its results are on the host and it is its turn.
    """

    def __init__(
        self, device: StepDevice, *, post: Callable[[Command], None], settle: Callable[[Step], None]
    ) -> None:
        self._device = device
        self._post = post
        self._settle = settle
        self._pending: deque[Step] = deque()  # accepted, not launched
        self._current: Step | None = None  # its round is under way
        self._retained: Step | None = None  # its round is over, its results are not sent

    @property
    def waits_for_gate(self) -> bool:
        """Whether nothing but a gate holds the device back."""
        step = self._gated_step()
        return step is not None and step.forward_ended_ns != 0

    @property
    def is_idle(self) -> bool:
        """Whether every accepted step is settled."""
        return self._current is None and self._retained is None and not self._pending

    def accept(self, step: Step) -> None:
        """Queues a step behind those accepted before."""
        self._pending.append(step)

    def find_unsampled(self, step_id: int) -> Step | None:
        """The step, if it was accepted and its sampling is not launched yet."""
        if self._current is not None and self._current.step_id == step_id:
            return None if self._current.sample_launched else self._current
        return next((step for step in self._pending if step.step_id == step_id), None)

    def deadline_ns(self) -> int | None:
        """When `advance` must be called although nothing has happened: a gate is overdue then."""
        step = self._gated_step()
        if step is None or step.forward_ended_ns == 0:
            return None
        return step.forward_ended_ns + step.gate_wait_ns

    def release_held(self) -> None:
        """Lets held events go (--hold-events, --single-step): for a flush, or because the epoch is over."""
        for step in (self._retained, self._current):
            if step is not None:
                step.release.set()

    def advance(self) -> None:
        """Goes on with the round as far as possible."""
        while self._advance_once():
            pass

    def _advance_once(self) -> bool:
        """One transition; whether there was one."""
        if self._retained is not None and self._retained.ended:
            retained, self._retained = self._retained, None
            self._settle(retained)
            return True
        if self._current is None:
            return self._start_round()
        if self._retained is not None:
            return False
        return self._finish_round(self._current)

    def _start_round(self) -> bool:
        if not self._pending:
            return False
        self._current = self._pending.popleft()
        self._launch_forward(self._current)
        return True

    def _finish_round(self, step: Step) -> bool:
        """What is left of the round once the step before is settled."""
        if step.batch is not None and not step.sample_launched:
            return self._try_sample(step, step.batch)
        if step.batch is not None and not step.in_place:
            self._retained, self._current = step, None
            return True
        if step.batch is not None and not step.ended:
            return False
        self._current = None
        self._settle(step)
        return True

    def _launch_forward(self, step: Step) -> None:
        if step.batch is not None:
            notify = None if step.gate is None else lambda: self._post(ForwardEnded(step))
            self._device.launch_forward(step, step.batch, notify)
        if self._retained is not None:
            self._retained.release.set()

    def _try_sample(self, step: Step, batch: StepBatch) -> bool:
        if step.gate is not None:
            if not step.gate.arrived and not self._gate_is_overdue(step):
                return False
            batch = step.gate.masked(batch)
        # Made beforehand: the device is idle from the end of a step to the start of the next one.
        self._device.launch_sample(step, batch, partial(self._post, StepEnded(step)))
        return True

    def _gate_is_overdue(self, step: Step) -> bool:
        ended_ns = step.forward_ended_ns
        return ended_ns != 0 and time.monotonic_ns() >= ended_ns + step.gate_wait_ns

    def _gated_step(self) -> Step | None:
        """The current step if its sampling waits for a gate."""
        step = self._current
        if step is None or self._retained is not None or step.sample_launched or step.gate is None:
            return None
        return step
