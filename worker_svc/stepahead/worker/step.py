"""One accepted plan on its way through the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event as Latch
from typing import TYPE_CHECKING

from stepahead.worker.errors import WorkerError

if TYPE_CHECKING:
    from stepahead.worker.gate import GateState
    from stepahead.worker.runner import StepBatch, StepSamples
    from stepahead.worker.step_batch import StepRows


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A plan's arrays and, as it runs, its clock. Times are this process's monotonic nanoseconds.

    The host thread fills it until it submits the step's work; the device thread fills the device's part; the
    host thread reads that part after the step's event has fired.
    """

    step_id: int
    worker_epoch: int
    in_place: bool  # COMPLETE_IN_PLACE
    batch: StepBatch | None  # None: a plan without rows
    rows: StepRows | None
    gate: GateState | None  # None: no constrained row samples
    gate_wait_ns: int
    max_step_ns: int
    read_ns: int  # the plan was read from the stream
    launched_ns: int = 0
    sample_launched: bool = False

    # Written by the device thread.
    started_ns: int = 0
    forward_ended_ns: int = 0
    sample_started_ns: int = 0
    ended_ns: int = 0
    gap_ns: int = 0
    running_step_id: int = 0
    queued_steps: int = 0
    samples: StepSamples | None = None

    ended: bool = False
    """Set on the host thread when the step's event has been handled."""
    release: Latch = field(default_factory=Latch)
    """With --hold-events or --single-step the device holds the step's end back until this is set."""


class StepTimeout(WorkerError):
    """A step used more device time than its bound: the device hangs, and the process must end."""

    def __init__(self, step_id: int, max_step_ns: int) -> None:
        super().__init__(f"step {step_id} ran longer than {max_step_ns / 1e9:.1f} s")
