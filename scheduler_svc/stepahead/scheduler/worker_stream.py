"""The first exchange of a RunSteps stream, and the ways in which a stream can fail."""

from __future__ import annotations

import asyncio

import grpc

from stepahead.v1 import worker_pb2

Call = grpc.aio.StreamStreamCall[worker_pb2.RunStepsRequest, worker_pb2.RunStepsResponse]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
]

RETRIED = ("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED")
"""Ends of a resume that say nothing about the session: a network on the way, a worker that is slow."""


class EpochClosed(Exception):
    """The session is over: its state on the worker is void."""


class StreamNotOpened(Exception):
    """A stream that never stood.

    Attributes:
        status: name of the gRPC status it ended with.
        detail: for a person.
    """

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(f"{status} {detail}")
        self.status = status
        self.detail = detail


class Refusals:
    """Tells a worker that is gone from a network that is down while a session waits to be resumed.

    A refused connection comes from a host that is there: nothing listens at the port, so the process that held the
    session has ended. Only a second of that counts, as a proxy on the way may refuse for a moment too.
    """

    LASTING_S = 1.0

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self, error: StreamNotOpened, now_s: float) -> None:
        """After each failed attempt to resume.

        Raises:
            EpochClosed: nothing has listened for `LASTING_S`.
        """
        if "Connection refused" not in error.detail:  # grpcio gives the cause in words only
            self._since = None
        elif self._since is None:
            self._since = now_s
        elif now_s - self._since >= self.LASTING_S:
            raise EpochClosed("the worker is gone: nothing listens at its address")

    def forget(self) -> None:
        """A stream stands, or a session is new."""
        self._since = None


async def open_stream(call: Call, message: worker_pb2.OpenSession, timeout_s: float) -> worker_pb2.SessionOpened:
    """Opens or resumes a session. A worker that says nothing (stopped, behind a dead network) is given up.

    Raises:
        StreamNotOpened: the worker refused, or did not answer in time.
        EpochClosed: it answered with something else.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(worker_pb2.RunStepsRequest(open=message))
            first = await call.read()
    except grpc.aio.AioRpcError as error:
        raise StreamNotOpened(error.code().name, error.details() or "") from error
    except TimeoutError as error:
        raise StreamNotOpened("DEADLINE_EXCEEDED", f"no answer within {timeout_s:.1f} s") from error
    if not isinstance(first, worker_pb2.RunStepsResponse):
        raise StreamNotOpened((await call.code()).name, await call.details() or "ended without an answer")
    if first.WhichOneof("event") != "opened":
        raise EpochClosed(f"the first message is {first.WhichOneof('event')}, not opened")
    return first.opened
