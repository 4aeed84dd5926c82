"""The outermost guard of every RPC: our errors become statuses, bugs become INTERNAL with an incident id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc
import structlog

from stepahead.scheduler.errors import ApiError, InternalError, abort
from stepahead.scheduler.telemetry import incident_id

log = structlog.get_logger("rpc")

ResultT = TypeVar("ResultT")
Context = grpc.aio.ServicerContext[object, object]


async def guarded(context: Context, handler: Awaitable[ResultT]) -> ResultT:
    """Awaits a handler. Whatever it raises ends the RPC with a proper status.

    A CancelledError passes: then the client is gone and nobody reads a status. grpcio would send any other
    exception to the client as UNKNOWN with its text.
    """
    failure: list[ApiError] = []
    try:
        return await handler
    except ApiError as error:
        failure.append(error)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:
        incident = incident_id()
        log.error("rpc failed", incident=incident, exc_info=error)
        failure.append(InternalError(incident))
    # Not in the handlers above: the error would be the context of grpcio's.
    return await abort(context, failure)
