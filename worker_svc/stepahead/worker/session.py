"""Who owns the worker: sessions, leases and stream generations. Pure: no gRPC, no clock of its own.

One scheduler owns the worker at a time. Its lease lasts while its stream is open and `resume_grace` longer; a
larger epoch of the same scheduler takes over at once, anyone else waits for the lease to end.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepahead.worker.errors import SessionRefused

if TYPE_CHECKING:
    from stepahead.v1.worker_pb2 import OpenSession
    from stepahead.worker.step_stream import StepStream


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One session and its newest stream."""

    session_id: int
    scheduler_instance_id: str
    scheduler_epoch: int
    worker_epoch: int
    overlap_depth: int
    stream_generation: int
    stream: StepStream | None  # None: its stream broke
    lease_ends_ns: int | None = None  # while there is no stream


class SessionRegistry:
    """The worker's session, if it has one.

    Args:
        resume_grace_ns: how long a session outlives its stream, in nanoseconds.
    """

    def __init__(self, resume_grace_ns: int) -> None:
        self._resume_grace_ns = resume_grace_ns
        self._newest_epochs: dict[str, int] = {}
        self._num_epochs = 0
        self.session: Session | None = None

    def open(self, request: OpenSession, stream: StepStream, now_ns: int) -> tuple[Session, StepStream | None]:
        """Starts a session or gives an existing one a new stream.

        Args:
            request: a complete OpenSession; `resume` says which.
            stream: the stream it came from.
            now_ns: monotonic nanoseconds.

        Returns:
            The session, and the stream it replaces.

        Raises:
            SessionRefused: the caller may not have the worker.
        """
        session = self.session
        if session is not None and session.lease_ends_ns is not None and session.lease_ends_ns <= now_ns:
            self.session = session = None
        if request.HasField("resume"):
            return self._resume(session, request, stream)
        return self._start(session, request, stream)

    def stream_ended(self, stream: StepStream, now_ns: int) -> Session | None:
        """The stream is over.

        Returns:
            Its session, whose lease has begun to run out; None if the stream had none or was replaced.
        """
        session = self.session
        if session is None or session.stream is not stream:
            return None
        session.stream = None
        session.lease_ends_ns = now_ns + self._resume_grace_ns
        return session

    def expire(self, session: Session, now_ns: int) -> bool:
        """Forgets the session if its lease has ended; whether it did."""
        ended = session.lease_ends_ns is not None and session.lease_ends_ns <= now_ns
        if self.session is session and ended:
            self.session = None
            return True
        return False

    def close(self, stream: StepStream) -> bool:
        """Forgets the session of the stream (CloseSession); whether it had one."""
        if self.session is None or self.session.stream is not stream:
            return False
        self.session = None
        return True

    def _start(
        self, owner: Session | None, request: OpenSession, stream: StepStream
    ) -> tuple[Session, StepStream | None]:
        instance_id = request.scheduler_instance_id
        if owner is not None and owner.scheduler_instance_id != instance_id:
            raise SessionRefused("WORKER_OWNED", f"the worker belongs to scheduler {owner.scheduler_instance_id}")
        newest = self._newest_epochs.get(instance_id, 0)
        if request.scheduler_epoch <= newest:
            raise SessionRefused("STALE_EPOCH", f"scheduler_epoch {request.scheduler_epoch} is not above {newest}")
        # Only the last owner is remembered: any other would have to outlive this session to come back.
        self._newest_epochs = {instance_id: request.scheduler_epoch}
        self._num_epochs += 1
        replaced = owner.stream if owner is not None else None
        self.session = Session(
            session_id=secrets.randbits(62) + 1,
            scheduler_instance_id=instance_id,
            scheduler_epoch=request.scheduler_epoch,
            worker_epoch=self._num_epochs,
            overlap_depth=request.overlap_depth,
            stream_generation=request.stream_generation,
            stream=stream,
        )
        return self.session, replaced

    def _resume(
        self, session: Session | None, request: OpenSession, stream: StepStream
    ) -> tuple[Session, StepStream | None]:
        if session is not None and session.scheduler_instance_id != request.scheduler_instance_id:
            raise SessionRefused("WORKER_OWNED", f"the worker belongs to scheduler {session.scheduler_instance_id}")
        if session is not None and request.scheduler_epoch < session.scheduler_epoch:
            raise SessionRefused(
                "STALE_EPOCH", f"scheduler_epoch {request.scheduler_epoch} is below {session.scheduler_epoch}"
            )
        if (
            session is None
            or session.session_id != request.resume.session_id
            or session.scheduler_epoch != request.scheduler_epoch
        ):
            raise SessionRefused("UNKNOWN_SESSION", f"there is no session {request.resume.session_id} to resume")
        if request.stream_generation <= session.stream_generation:
            raise SessionRefused(
                "STALE_GENERATION",
                f"stream_generation {request.stream_generation} is not above {session.stream_generation}",
            )
        replaced, session.stream = session.stream, stream
        session.stream_generation = request.stream_generation
        session.lease_ends_ns = None
        return session, replaced
