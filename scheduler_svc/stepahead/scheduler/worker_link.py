"""One worker, seen over the wire: dial, open a session, send plans, read boundaries, resume, give up.

A link makes no scheduling decision. It lives as long as the process:

    dialling --GetWorkerInfo--> opening --SessionOpened--> open --stream broke--> resuming --> open
        ^                                                   |                        |
        `---------------- epoch closed: lane lost <---------+------------------------'

Every plan is kept until its boundary has been committed, so that a resume can send again what the worker has
not accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from enum import Enum

import grpc
import structlog

from stepahead.scheduler.convert import PROTOCOL_MAJOR, PROTOCOL_MINOR, WireError, lane_config_of
from stepahead.scheduler.core import CommitOutcome, LaneId, StepMismatch
from stepahead.scheduler.flushes import Flushes
from stepahead.scheduler.link_owner import LinkOwner, WorkerRefused
from stepahead.scheduler.outbox import Outbox
from stepahead.scheduler.sent_steps import SentSteps
from stepahead.scheduler.settings import Settings
from stepahead.scheduler.step_stats import StepStats, record_of
from stepahead.scheduler.worker_stream import (
    CHANNEL_OPTIONS,
    RETRIED,
    Call,
    EpochClosed,
    Refusals,
    StreamNotOpened,
    open_stream,
)
from stepahead.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger("worker_link")

PING_INTERVAL_S = 0.5
PONG_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
"""Between two looks at a worker that loads, restarts or is unreachable."""
REFUSED_BACKOFF_S = 5.0


class LinkState(Enum):
    """Where the link is."""

    DIALLING = "dialling"
    OPEN = "open"
    RESUMING = "resuming"
    CLOSED = "closed"


class WorkerLink:
    """See the module docstring."""

    def __init__(
        self, lane_id: LaneId, address: str, owner: LinkOwner, settings: Settings, instance_id: str
    ) -> None:
        self.lane_id = lane_id
        self.address = address
        self.state = LinkState.DIALLING
        self.info = worker_pb2.GetWorkerInfoResponse()
        self.worker_epoch: int = 0
        self.stats = StepStats()
        self.last_step_id = 0
        self.last_completed_step_id = 0
        self.is_retired = False
        """No new session is opened; the one that stands goes on until it ends."""
        self.refusal = ""  # why it cannot join as it is; empty: it can, or it does not answer
        self._owner = owner
        self._settings = settings
        self._instance_id = instance_id
        self._sent = SentSteps()
        self._recorded: dict[int, worker_pb2.StepPlan] = {}  # of boundaries not noted yet (--record-steps)
        self._fresh_starts: set[int] = set()  # steps that started an idle lane: their gap is nobody's fault
        self._outbox = Outbox()
        self._session_id = 0
        self._resume_grace_s = 0.0
        self._pong_at = 0.0
        self._heard_at = 0.0
        self._is_silent = False
        self._running_step_age_ns = 0
        self._flushes = Flushes()
        self._refusals = Refusals()
        self._closing = False
        self._not_ready: tuple[str, str] | None = None  # status and detail, as logged last
        self._closed = asyncio.Event()

    # -------------------------------------------------------------------------------------------- engine side

    def send_plan(self, plan: worker_pb2.StepPlan, *, work_waited: bool) -> None:
        """Writes a plan now, or behind what is being written; keeps it until its boundary is committed."""
        message = worker_pb2.RunStepsRequest(plan=plan)
        self._sent.add_plan(message)
        self.last_step_id = plan.step_id
        if not work_waited:
            self._fresh_starts.add(plan.step_id)
        if self.state is LinkState.OPEN:
            self._outbox.put(message)

    def send_gate(self, gate: worker_pb2.SampleGate) -> None:
        """As `send_plan`, for the masks of a step sent before. Overtakes nothing here; the worker lets it pass."""
        message = worker_pb2.RunStepsRequest(gate=gate)
        if self._sent.add_gate(message) and self.state is LinkState.OPEN:
            self._outbox.put(message)

    def note_boundary(self, boundary: worker_pb2.StepBoundary, outcome: CommitOutcome, plan_ns: int) -> None:
        """Bookkeeping after the engine's turn."""
        step_id = boundary.completed_step_id
        record = record_of(boundary, outcome, plan_ns, work_waited=step_id not in self._fresh_starts)
        if self._settings.record_steps:
            record.plan, record.boundary = self._recorded.pop(step_id), boundary
        self._fresh_starts.discard(step_id)
        self.stats.add(boundary, record)

    @property
    def is_ready(self) -> bool:
        """Whether the step loop of the worker answered lately and no step hangs (rule O4)."""
        return (
            self.state is LinkState.OPEN
            and time.monotonic() - self._pong_at < 3 * PING_INTERVAL_S + 1.0
            and self._running_step_age_ns < self._settings.max_step_s * 1e9
        )

    async def flush(self) -> None:
        """Returns when no boundary of a step sent so far is owed any more; at once if no session stands."""
        if not self._session_id:
            return
        message, flushed = self._flushes.begin()
        if self.state is LinkState.OPEN:
            self._outbox.put(message)
        await flushed

    def retire(self, *, retired: bool) -> None:
        """The worker's name does not stand for this address any more, or does again."""
        self.is_retired = retired
        if not retired and not self._closing:
            self._closed.clear()
        elif not self._session_id:
            self._closed.set()

    def close(self) -> None:
        """Ends the session in an orderly way; `run` returns soon after."""
        self._closing = True
        self._closed.set()
        self._outbox.put(worker_pb2.RunStepsRequest(close=worker_pb2.CloseSession(reason="scheduler stops")))

    # -------------------------------------------------------------------------------------------- life

    async def run(self) -> None:
        """Keeps a session with the worker until `close` is called, or `retire` and no session stands."""
        backoff_s = FIRST_BACKOFF_S
        while not self._closing and not self.is_retired:
            try:
                async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                    await self._session(worker_pb2_grpc.WorkerServiceStub(channel))
                backoff_s = FIRST_BACKOFF_S
            except WorkerRefused as error:
                self.refusal = str(error)
                self._owner.on_refused(self, self.refusal)
                backoff_s = REFUSED_BACKOFF_S
            except grpc.aio.AioRpcError as error:
                # Loading, restarting, unreachable: back-off belongs to the session, not to the channel.
                self._log_not_ready(error.code().name, error.details() or "")
            except StreamNotOpened as error:
                self._log_not_ready(error.status, error.detail)
            if not self._closing:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), backoff_s)
                backoff_s = min(backoff_s * 2, LAST_BACKOFF_S)
        self.state = LinkState.CLOSED

    def _log_not_ready(self, status: str, detail: str) -> None:
        self.refusal = ""
        if (status, detail) == self._not_ready:
            return  # said already: it is asked every second
        self._not_ready = status, detail
        level = log.info if status == "UNAVAILABLE" else log.warning
        level("worker not ready", worker=self.address, status=status, detail=detail)

    async def _session(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        """From dialling to the end of one epoch."""
        self.state = LinkState.DIALLING
        self.info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=5.0)
        self._not_ready = None
        try:
            lane_config_of(self.info)
        except ValueError as error:
            raise WorkerRefused(f"it cannot be used: {error}") from error
        await self._owner.adopt(self, stub)
        self.refusal = ""
        epoch = self._owner.next_epoch()
        self._forget_session()
        generation = 1
        reason = "session closed"
        try:
            await self._stream(stub, epoch, generation, OPEN_TIMEOUT_S)
            give_up_at = time.monotonic() + 0.8 * self._resume_grace_s
            while not (self._closing or self.is_retired) and (left_s := give_up_at - time.monotonic()) > 0:
                generation += 1
                if await self._try_resume(stub, epoch, generation, min(OPEN_TIMEOUT_S, left_s)):
                    give_up_at = time.monotonic() + 0.8 * self._resume_grace_s
            reason = "stream broke and could not be resumed"
        except EpochClosed as error:
            reason = str(error)
            log.warning("epoch closed", worker=self.address, epoch=epoch, reason=reason)
        finally:
            self._owner.lose_lane(self, reason)
            self._forget_session()

    async def _try_resume(
        self, stub: worker_pb2_grpc.WorkerServiceAsyncStub, epoch: int, generation: int, timeout_s: float
    ) -> bool:
        """One attempt to continue the session. True if a stream stood (and has broken again since)."""
        self.state = LinkState.RESUMING
        try:
            await self._stream(stub, epoch, generation, timeout_s)
        except StreamNotOpened as error:
            if error.status not in RETRIED:
                raise EpochClosed(f"resume refused: {error}") from error
            self._refusals.note(error, time.monotonic())
            await asyncio.sleep(FIRST_BACKOFF_S)
            return False
        return True

    def _forget_session(self) -> None:
        self._sent.clear()
        self._fresh_starts.clear()
        self._outbox.clear()
        self._session_id = 0
        self.worker_epoch = 0
        self.last_step_id = 0
        self.last_completed_step_id = 0
        self._running_step_age_ns = 0
        self._flushes.end()
        self._refusals.forget()

    # -------------------------------------------------------------------------------------------- one stream

    async def _stream(
        self, stub: worker_pb2_grpc.WorkerServiceAsyncStub, epoch: int, generation: int, timeout_s: float
    ) -> None:
        """Runs one stream until it breaks (returns) or the epoch is over (raises EpochClosed).

        Raises:
            StreamNotOpened: the stream never stood.
        """
        call: Call = stub.RunSteps()
        try:
            self._opened(await open_stream(call, self._open_message(epoch, generation), timeout_s), epoch)
            self._outbox.attach(call)
            pings = asyncio.create_task(self._ping(call))
            try:
                await self._read(call)
            finally:
                pings.cancel()
                await self._outbox.detach()
                await asyncio.gather(pings, return_exceptions=True)
        finally:
            # A dropped call object would go on running on the other side.
            call.cancel()

    def _open_message(self, epoch: int, generation: int) -> worker_pb2.OpenSession:
        message = worker_pb2.OpenSession(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            scheduler_instance_id=self._instance_id,
            scheduler_epoch=epoch,
            model_fingerprint=self.info.model.fingerprint,
            overlap_depth=self._settings.overlap_depth,
            stream_generation=generation,
        )
        if self._session_id:
            message.resume.session_id = self._session_id
            message.resume.last_completed_step_id = self.last_completed_step_id
        return message

    def _opened(self, opened: worker_pb2.SessionOpened, epoch: int) -> None:
        resumed = bool(self._session_id)
        if resumed and opened.worker_epoch != self.worker_epoch:
            raise EpochClosed("the worker lost the session")
        self._session_id = opened.session_id
        self._resume_grace_s = opened.resume_grace_ns / 1e9
        self.worker_epoch = opened.worker_epoch
        self._pong_at = time.monotonic()
        self.state = LinkState.OPEN
        if not resumed:
            self._owner.open_lane(self, lane_config_of(self.info), opened.worker_epoch)
            return
        self.stats.num_resumes += 1
        self._refusals.forget()
        self._outbox.clear()
        again = [*self._sent.again(opened.last_accepted_step_id), *self._flushes.unanswered()]
        for message in again:
            self._outbox.put(message)
        log.info("session resumed", worker=self.address, epoch=epoch, resent_messages=len(again))

    async def _ping(self, call: Call) -> None:
        """Asks the worker's step loop for a sign of life; ends the call of a worker that says nothing.

        The reader itself has no timeout: one per boundary would cost a task and two turns of the loop each.
        """
        nonce = 0
        self._is_silent = False
        self._heard_at = time.monotonic()
        while time.monotonic() - self._heard_at < PONG_TIMEOUT_S:
            nonce += 1
            self._outbox.put(worker_pb2.RunStepsRequest(ping=worker_pb2.Ping(nonce=nonce)))
            await asyncio.sleep(PING_INTERVAL_S)
        log.warning("worker silent", worker=self.address, seconds=PONG_TIMEOUT_S)
        self._is_silent = True
        call.cancel()

    async def _read(self, call: Call) -> None:
        """Reads until the stream breaks. The engine's turn runs right here."""
        while True:
            try:
                response = await call.read()
            except asyncio.CancelledError:
                if self._is_silent:
                    return  # our own cancel of the call, not of this task
                raise
            except grpc.aio.AioRpcError as error:
                log.warning("stream broke", worker=self.address, status=error.code().name, detail=error.details())
                if error.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION):
                    raise EpochClosed(f"{error.code().name} {error.details()}") from error
                return
            if not isinstance(response, worker_pb2.RunStepsResponse):
                if self._closing:
                    raise EpochClosed("closed by us")
                return
            self._heard_at = time.monotonic()
            self._handle(response, time.monotonic_ns())

    def _handle(self, response: worker_pb2.RunStepsResponse, read_ns: int) -> None:
        kind = response.WhichOneof("event")
        if kind == "boundary":
            self._on_boundary(response.boundary, read_ns)
        elif kind == "pong":
            self._pong_at = time.monotonic()
            self._running_step_age_ns = response.pong.running_step_age_ns
            if self._running_step_age_ns > self._settings.max_step_s * 1e9:
                raise EpochClosed(f"a step has been running for {self._running_step_age_ns / 1e9:.1f} s")
        elif kind == "failed":
            self._on_failed(response.failed)
        elif kind == "rejected":
            self._on_rejected(response.rejected)
        elif kind == "drained":
            self._flushes.answer(response.drained.nonce)
        else:
            raise EpochClosed(f"unexpected message {kind}")

    def _on_boundary(self, boundary: worker_pb2.StepBoundary, read_ns: int) -> None:
        step_id = boundary.completed_step_id
        if boundary.worker_epoch != self.worker_epoch or step_id <= self.last_completed_step_id:
            log.info("stale boundary dropped", worker=self.address, step_id=step_id)
            return
        self.last_completed_step_id = step_id
        plan = self._sent.complete(step_id)
        if self._settings.record_steps and plan is not None:
            self._recorded[step_id] = plan
        try:
            self._owner.on_boundary(self, boundary, read_ns)
        except (StepMismatch, WireError) as error:
            raise EpochClosed(f"boundary of step {step_id}: {error}") from error

    def _on_failed(self, failed: worker_pb2.StepFailed) -> None:
        log.error("step failed", worker=self.address, step_id=failed.step_id, detail=failed.message)
        if failed.scope != worker_pb2.StepFailed.SCOPE_STEP:
            raise EpochClosed(f"worker failed at step {failed.step_id}")
        self.last_completed_step_id = failed.step_id
        self._sent.complete(failed.step_id)
        try:
            self._owner.on_step_failed(self, self.worker_epoch, failed.step_id)
        except StepMismatch as error:
            raise EpochClosed(str(error)) from error

    def _on_rejected(self, rejected: worker_pb2.StepRejected) -> None:
        if rejected.reason == worker_pb2.StepRejected.REASON_ALREADY_EXECUTED:
            return  # a plan sent again after a resume
        reasons = worker_pb2.StepRejected.Reason
        reason = reasons.Name(rejected.reason) if rejected.reason in reasons.values() else str(rejected.reason)
        log.error(
            "plan rejected",
            worker=self.address,
            step_id=rejected.step_id,
            reason=reason,
            violations=list(rejected.violations),
        )
        raise EpochClosed(f"plan {rejected.step_id} rejected: {reason}")
