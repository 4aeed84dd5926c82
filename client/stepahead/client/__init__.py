"""The Python client of a Stepahead scheduler.

    from stepahead.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)

`AsyncClient` has the same methods for asyncio. errors.py draws the tree of exceptions.
"""

from stepahead.client.aio_client import AsyncClient
from stepahead.client.aio_stream import AsyncCompletionStream
from stepahead.client.channel import DEFAULT_ADDRESS
from stepahead.client.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    DeadlineError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    StepaheadError,
    UnavailableError,
    UnsupportedError,
)
from stepahead.client.multiplex import AsyncMultiplex, MultiplexUpdate
from stepahead.client.reattaching import ConnectionChange, OnConnectionChange
from stepahead.client.requests import ChatTurn, GenerateOptions, GenerationRequest, Prompt
from stepahead.client.status import SchedulerState, ServerStatus, WorkerStatus
from stepahead.client.sync_client import Client
from stepahead.client.sync_stream import CompletionStream
from stepahead.client.values import (
    CancelOutcome,
    ChatMessage,
    Choice,
    Completion,
    Delta,
    FinishReason,
    ModelInfo,
    Phase,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)

__all__ = [
    "DEFAULT_ADDRESS",
    "AccessDeniedError",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncCompletionStream",
    "AsyncMultiplex",
    "CancelOutcome",
    "ChatMessage",
    "ChatTurn",
    "Choice",
    "Client",
    "Completion",
    "CompletionStream",
    "ConnectionChange",
    "DeadlineError",
    "Delta",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "GenerateOptions",
    "GenerationRequest",
    "InternalError",
    "InvalidRequestError",
    "ModelInfo",
    "MultiplexUpdate",
    "NotFoundError",
    "OnConnectionChange",
    "OverloadedError",
    "Phase",
    "Prompt",
    "ProtocolError",
    "RequestCancelledError",
    "SchedulerState",
    "ServerStatus",
    "Started",
    "StepaheadError",
    "Timings",
    "TokenLogprob",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
    "WorkerStatus",
]
