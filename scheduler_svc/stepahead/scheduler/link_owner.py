"""What a worker link tells its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stepahead.scheduler.core import LaneConfig
from stepahead.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from stepahead.scheduler.worker_link import WorkerLink


class WorkerRefused(Exception):
    """The worker cannot join; it is asked again later."""


class LinkOwner(Protocol):
    """What the link tells, in order, on the event loop."""

    async def adopt(self, link: WorkerLink, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        """Checks link.info against the served model (or serves it). Raises WorkerRefused."""
        ...

    def on_refused(self, link: WorkerLink, reason: str) -> None:
        """The worker cannot join as it is, or not yet."""
        ...

    def next_epoch(self) -> int:
        """A scheduler epoch larger than every earlier one of this process."""
        ...

    def open_lane(self, link: WorkerLink, config: LaneConfig, epoch: int) -> None:
        """A new session stands."""
        ...

    def lose_lane(self, link: WorkerLink, reason: str) -> None:
        """The session is over. Harmless if none stood."""
        ...

    def on_boundary(self, link: WorkerLink, boundary: worker_pb2.StepBoundary, read_ns: int) -> None:
        """A boundary of the current session, in step order. Raises StepMismatch."""
        ...

    def on_step_failed(self, link: WorkerLink, epoch: int, step_id: int) -> None:
        """A step failed as a whole."""
        ...
