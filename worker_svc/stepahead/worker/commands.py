"""What reaches the executor's one inbox: commands of the session's stream, and events of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stepahead.v1.worker_pb2 import RunStepsResponse, SampleGate, StepPlan
    from stepahead.worker.status import StreamStatus
    from stepahead.worker.step import Step


class Outlet(Protocol):
    """The sending half of a session's stream. Any thread may call it; order is kept; it never blocks."""

    def send(self, message: RunStepsResponse, device_end_ns: int = 0) -> None:
        """Queues a message; `device_end_ns` dates a boundary's device event for `send_delay_ns`."""
        ...

    def end(self, status: StreamStatus | None) -> None:
        """Ends the stream behind everything queued; None is OK."""
        ...


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """A new session: everything of the old one is void."""

    outlet: Outlet
    session_id: int
    worker_epoch: int
    overlap_depth: int


@dataclass(frozen=True, slots=True)
class ResumeEpoch:
    """The session continues on another stream."""

    outlet: Outlet
    last_completed_step_id: int


@dataclass(frozen=True, slots=True)
class CloseEpoch:
    """The session is over: all slots are free."""


@dataclass(frozen=True, slots=True)
class PlanArrived:
    """A plan and when it was read (monotonic nanoseconds)."""

    plan: StepPlan
    read_ns: int


@dataclass(frozen=True, slots=True)
class GateArrived:
    """A gate."""

    gate: SampleGate


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Every outstanding boundary, then Drained."""

    nonce: int


@dataclass(frozen=True, slots=True)
class PingArrived:
    """A question to the loop that runs steps."""

    nonce: int


@dataclass(frozen=True, slots=True)
class StopExecutor:
    """The process ends."""


@dataclass(frozen=True, slots=True)
class ForwardEnded:
    """The forward of a constrained step has ended: its gate's clock runs."""

    step: Step


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The event of a step has fired: its results are on the host."""

    step: Step


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """The device thread has ended with an exception."""

    error: Exception


Command = (
    OpenEpoch
    | ResumeEpoch
    | CloseEpoch
    | PlanArrived
    | GateArrived
    | DrainRequested
    | PingArrived
    | StopExecutor
    | ForwardEnded
    | StepEnded
    | DeviceFailed
)
