"""The gRPC face of the worker: opens sessions, reads commands, writes events. Never touches the device."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING, Any, Never

import grpc
import grpc.aio
import structlog
from typing_extensions import override

from stepahead.v1 import worker_pb2, worker_pb2_grpc
from stepahead.worker import commands, convert, status
from stepahead.worker.errors import SessionRefused
from stepahead.worker.session import SessionRegistry
from stepahead.worker.status import StreamStatus
from stepahead.worker.step_stream import StepStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stepahead.worker.executor import Executor
    from stepahead.worker.session import Session

    Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.stdlib.get_logger()

LOADING = StreamStatus(code=grpc.StatusCode.UNAVAILABLE, reason="LOADING", message="loading")
SHUTTING_DOWN = StreamStatus(
    code=grpc.StatusCode.UNAVAILABLE, reason="WORKER_SHUTTING_DOWN", message="the worker is shutting down"
)
SUPERSEDED = StreamStatus(
    code=grpc.StatusCode.ABORTED, reason="SESSION_SUPERSEDED", message="a newer stream has taken the session"
)


class LoadedWorker:
    """What the service needs once the model is loaded."""

    def __init__(
        self, executor: Executor, worker_info: worker_pb2.GetWorkerInfoResponse, tokenizer_bundle: bytes
    ) -> None:
        self.executor = executor
        self.worker_info = worker_info
        self.tokenizer_bundle = tokenizer_bundle


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService. Event loop only.

    Args:
        resume_grace_ns: how long a session outlives its stream.
    """

    def __init__(self, resume_grace_ns: int) -> None:
        self._resume_grace_s = resume_grace_ns / 1e9
        self._registry = SessionRegistry(resume_grace_ns)
        self._loaded: LoadedWorker | None = None
        self._streams: set[StepStream] = set()
        self._is_shut_down = False

    def serve(self, loaded: LoadedWorker) -> None:
        """Sessions are accepted from now on."""
        self._loaded = loaded

    def shut_down(self) -> None:
        """Takes no more plans and ends every stream UNAVAILABLE."""
        self._is_shut_down = True
        for stream in self._streams:
            stream.finish(SHUTTING_DOWN)

    @override
    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: Context
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Identity, limits and model facts."""
        if self._loaded is None:
            await _abort(context, LOADING)
        return self._loaded.worker_info

    @override
    async def GetTokenizerBundle(
        self, request: worker_pb2.GetTokenizerBundleRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetTokenizerBundleResponse]:
        """The bundle in pieces of up to 1 MiB, its digest on the last one."""
        if self._loaded is None:
            await _abort(context, LOADING)
        bundle = self._loaded.tokenizer_bundle
        if not bundle:
            await _abort(
                context,
                StreamStatus(
                    code=grpc.StatusCode.NOT_FOUND, reason="NO_TOKENIZER", message="the model has no tokenizer"
                ),
            )
        digest = hashlib.sha256(bundle).hexdigest()
        for start in range(0, len(bundle), convert.MAX_BUNDLE_CHUNK_BYTES):
            end = start + convert.MAX_BUNDLE_CHUNK_BYTES
            yield worker_pb2.GetTokenizerBundleResponse(
                data=bundle[start:end], sha256=digest if end >= len(bundle) else ""
            )

    @override
    async def RunSteps(
        self,
        request_iterator: AsyncIterator[worker_pb2.RunStepsRequest],
        context: Context,
    ) -> AsyncIterator[worker_pb2.RunStepsResponse]:
        """One session's stream: this coroutine is its only writer, a task beside it the reader."""
        loop = asyncio.get_running_loop()
        stream = StepStream(loop)
        self._streams.add(stream)
        reader = loop.create_task(self._read(request_iterator, stream))
        # The generator may be suspended in a write that never ends; the call's own end is always told.
        call: Any = context  # the stubs type this callback as an abstract class
        call.add_done_callback(lambda _: self._end_stream(stream, reader))  # pyright: ignore[reportUnknownLambdaType]
        async for message in stream.messages():
            yield message
        if stream.status is not None:
            await _abort(context, stream.status)

    async def _read(
        self,
        requests: AsyncIterator[worker_pb2.RunStepsRequest],
        stream: StepStream,
    ) -> None:
        """Reads commands until the stream is over; whatever goes wrong here becomes its status."""
        loaded = self._loaded
        if loaded is None or self._is_shut_down:
            stream.finish(LOADING if loaded is None else SHUTTING_DOWN)
            return
        try:
            is_open = False
            async for request in requests:
                if stream.is_over:
                    return
                if is_open:
                    self._dispatch(loaded, request, stream)
                else:
                    self._open(loaded, request, stream)
                    is_open = True
                if stream.is_over:  # the call may end at any time now, and a read would fail
                    return
            stream.finish(None)
        except SessionRefused as refusal:
            log.warning("session_refused", reason=refusal.reason, detail=str(refusal))
            stream.finish(_precondition(refusal.reason, str(refusal)))
        except InvalidCommand as fault:
            stream.finish(status.invalid_argument(fault.field, str(fault)))
        except Exception:
            if stream.is_over:
                return  # the call ended under the read: nothing was lost, and nobody reads a status
            incident_id = status.new_incident_id()
            log.exception("stream_reader_failed", incident_id=incident_id)
            stream.finish(status.internal_error(incident_id))

    def _open(self, loaded: LoadedWorker, request: worker_pb2.RunStepsRequest, stream: StepStream) -> None:
        if request.WhichOneof("command") != "open":
            raise InvalidCommand("command", "the first message must be open")
        open_session = request.open
        _check_open(open_session, loaded.worker_info)
        session, replaced = self._registry.open(open_session, stream, time.monotonic_ns())
        if replaced is not None:
            replaced.supersede(SUPERSEDED)
        is_resume = open_session.HasField("resume")
        log.info(
            "session_resumed" if is_resume else "session_opened",
            session_id=session.session_id,
            scheduler_instance_id=session.scheduler_instance_id,
            scheduler_epoch=session.scheduler_epoch,
            worker_epoch=session.worker_epoch,
            stream_generation=session.stream_generation,
            overlap_depth=session.overlap_depth,
        )
        if is_resume:
            last_completed = open_session.resume.last_completed_step_id
            loaded.executor.submit(commands.ResumeEpoch(stream, last_completed))
        else:
            loaded.executor.submit(
                commands.OpenEpoch(stream, session.session_id, session.worker_epoch, session.overlap_depth)
            )

    def _dispatch(self, loaded: LoadedWorker, request: worker_pb2.RunStepsRequest, stream: StepStream) -> None:
        """Puts a command into the executor's inbox. Cheap: the reader never waits for the executor."""
        submit = loaded.executor.submit
        match request.WhichOneof("command"):
            case "plan":
                submit(commands.PlanArrived(request.plan, time.monotonic_ns()))
            case "gate":
                submit(commands.GateArrived(request.gate))
            case "ping":
                submit(commands.PingArrived(request.ping.nonce))
            case "drain":
                submit(commands.DrainRequested(request.drain.nonce))
            case "close":
                if self._registry.close(stream):
                    log.info("session_closed", reason=request.close.reason[:200])
                    submit(commands.CloseEpoch())
                stream.finish(None)
            case "open":
                raise InvalidCommand("command", "open must be the first message and the only one of its kind")
            case None:
                raise InvalidCommand("command", "is not set, or unknown to this version")

    def _end_stream(self, stream: StepStream, reader: asyncio.Task[None]) -> None:
        """The call is over, however it ended: the session's lease begins to run out."""
        reader.cancel()
        self._streams.discard(stream)
        stream.finish(None)
        session = self._registry.stream_ended(stream, time.monotonic_ns())
        if session is not None and not self._is_shut_down:
            log.info("stream_ended", session_id=session.session_id, resume_grace_s=self._resume_grace_s)
            loop = asyncio.get_running_loop()
            # A little later than the lease, so that one look is enough.
            loop.call_later(self._resume_grace_s + 0.01, self._expire, session)

    def _expire(self, session: Session) -> None:
        if self._loaded is not None and self._registry.expire(session, time.monotonic_ns()):
            log.info("session_expired", session_id=session.session_id)
            self._loaded.executor.submit(commands.CloseEpoch())


class InvalidCommand(Exception):
    """A message that ends its stream INVALID_ARGUMENT.

    Attributes:
        field: at fault.
    """

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(fault)
        self.field = field


def _check_open(request: worker_pb2.OpenSession, info: worker_pb2.GetWorkerInfoResponse) -> None:
    """What an OpenSession must say, whoever sends it."""
    if request.protocol_major != convert.PROTOCOL_MAJOR:
        raise SessionRefused(
            "PROTOCOL_MISMATCH",
            f"protocol_major is {request.protocol_major}, the worker speaks {convert.PROTOCOL_MAJOR}",
        )
    if request.model_fingerprint not in ("", info.model.fingerprint):
        raise SessionRefused("MODEL_MISMATCH", f"the worker serves model {info.model.fingerprint}")
    if not request.scheduler_instance_id:
        raise InvalidCommand("open.scheduler_instance_id", "must not be empty")
    if request.scheduler_epoch == 0:
        raise InvalidCommand("open.scheduler_epoch", "must be at least 1")
    if request.stream_generation == 0:
        raise InvalidCommand("open.stream_generation", "must be at least 1")
    if request.overlap_depth > info.limits.max_overlap_depth:
        raise InvalidCommand(
            "open.overlap_depth", f"is {request.overlap_depth}, the worker allows {info.limits.max_overlap_depth}"
        )


def _precondition(reason: str, message: str) -> StreamStatus:
    return StreamStatus(code=grpc.StatusCode.FAILED_PRECONDITION, reason=reason, message=message)


async def _abort(context: Context, end: StreamStatus) -> Never:
    final = end.to_grpc()
    await context.abort(final.code, final.details, final.trailing_metadata)
