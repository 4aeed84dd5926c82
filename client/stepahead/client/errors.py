"""The SDK's errors, and the one place that reads them out of a gRPC status.

    StepaheadError                 everything below
    +-- InvalidRequestError        a field is wrong: .field, .violations,   INVALID_ARGUMENT, OUT_OF_RANGE
    |                              .limit, .actual
    +-- NotFoundError              no such model or request                 NOT_FOUND
    +-- AlreadyExistsError         the request id is live with another body ALREADY_EXISTS
    +-- FailedPreconditionError    not possible in this state               FAILED_PRECONDITION
    +-- UnsupportedError           the server does not serve this call      UNIMPLEMENTED
    +-- AccessDeniedError          who you are, or what you may do          UNAUTHENTICATED, PERMISSION_DENIED
    +-- OverloadedError            a queue is full; .retry_delay_s          RESOURCE_EXHAUSTED
    +-- UnavailableError           not there or not ready; .retry_delay_s   UNAVAILABLE
    +-- DeadlineError              too late                                 DEADLINE_EXCEEDED
    +-- RequestCancelledError      through Cancel or from this side         CANCELLED
    +-- InternalError              a fault of the server                    INTERNAL and all others
    +-- ProtocolError              the server broke its own protocol        (no status)

Only UnavailableError and OverloadedError invite another try.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

_Message = TypeVar("_Message", bound=Message)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field: its path in GenerateRequest (such as `stopping.max_tokens`) and what is wrong."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """The structured part of an error. `retry_delay_s` is in seconds."""

    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    violations: tuple[FieldViolation, ...] = ()
    retry_delay_s: float | None = None


class StepaheadError(Exception):
    """Base of all errors of the SDK.

    `code` is the name of the gRPC status ("" if none was involved), `reason` the server's machine-readable
    reason ("" if the text is not the server's), `metadata` its facts. `retry_delay_s` says when to try again, if
    the server knows.
    """

    def __init__(self, message: str, *, code: str = "", details: ErrorDetails | None = None) -> None:
        super().__init__(message)
        details = details or ErrorDetails()
        self.message = message
        self.code = code
        self.reason = details.reason
        self.metadata = details.metadata
        self.violations = details.violations
        self.retry_delay_s = details.retry_delay_s


class InvalidRequestError(StepaheadError):
    """A field of the request is wrong."""

    @property
    def field(self) -> str | None:
        """Path of the first wrong field, if the server named one."""
        return self.violations[0].field if self.violations else None

    @property
    def limit(self) -> int | None:
        """What the server allows, if a limit was passed and it said so."""
        return _whole_number(self.metadata.get("limit"))

    @property
    def actual(self) -> int | None:
        """What was asked for, if a limit was passed and the server said so."""
        return _whole_number(self.metadata.get("actual"))


class NotFoundError(StepaheadError):
    """There is no such model or request."""


class AlreadyExistsError(StepaheadError):
    """A live request has the same id and another body."""


class FailedPreconditionError(StepaheadError):
    """The call is not possible in the server's present state."""


class UnsupportedError(StepaheadError):
    """The server does not serve this call."""


class AccessDeniedError(StepaheadError):
    """The caller is unknown or may not do this."""


class OverloadedError(StepaheadError):
    """A queue or a quota is full; `retry_delay_s` says when to try again, if the server knows."""


class UnavailableError(StepaheadError):
    """Nobody answers, or the server is not ready; `retry_delay_s` says when to try again, if known."""


class DeadlineError(StepaheadError):
    """The deadline passed before the answer was complete."""


class RequestCancelledError(StepaheadError):
    """The request was cancelled, through Cancel or by closing its stream."""


class InternalError(StepaheadError):
    """A fault of the server."""


class ProtocolError(StepaheadError):
    """The server sent something its own protocol forbids, such as a gap in the token indexes."""


_CLASS_OF_CODE: Mapping[grpc.StatusCode, type[StepaheadError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
}


def _whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def invalid(violations: Sequence[FieldViolation]) -> InvalidRequestError:
    """The error for values that this side already knows to be wrong."""
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    code = grpc.StatusCode.INVALID_ARGUMENT.name
    return InvalidRequestError(message, code=code, details=ErrorDetails(violations=tuple(violations)))


def from_status(status: Status) -> StepaheadError:
    """The error for a google.rpc.Status, as Multiplex carries it in band."""
    return _build(_code_of_number(status.code), status.message, _read_details(status.details))


def from_rpc_error(error: grpc.RpcError) -> StepaheadError:
    """The error for a failed call, sync or asyncio."""
    # AioRpcError is no grpc.Call, but has the three methods that are read here.
    call = cast(grpc.Call, error)
    try:
        status = cast(Status | None, rpc_status.from_call(call))  # pyright: ignore[reportUnknownMemberType]
    except ValueError:
        # The details contradict the status of the call; the status is what counts then.
        status = None
    details = _read_details(status.details) if status is not None else ErrorDetails()
    # A call that ends before the server answers has no text of its own.
    return _build(call.code(), call.details() or "", details)


def _build(code: grpc.StatusCode, message: str, details: ErrorDetails) -> StepaheadError:
    error_class = _CLASS_OF_CODE.get(code, InternalError)
    return error_class(message or code.name.replace("_", " ").lower(), code=code.name, details=details)


def _code_of_number(number: int) -> grpc.StatusCode:
    for code in grpc.StatusCode:
        if cast(tuple[int, str], code.value)[0] == number:
            return code
    return grpc.StatusCode.UNKNOWN


def _read_details(details: Sequence[AnyMessage]) -> ErrorDetails:
    reason = ""
    metadata: dict[str, str] = {}
    violations: list[FieldViolation] = []
    retry_delay_s: float | None = None
    for detail in details:
        bad_request = _unpack(detail, error_details_pb2.BadRequest)
        if bad_request is not None:
            violations += [FieldViolation(each.field, each.description) for each in bad_request.field_violations]
        error_info = _unpack(detail, error_details_pb2.ErrorInfo)
        if error_info is not None:
            reason = error_info.reason
            metadata.update(error_info.metadata)
        retry_info = _unpack(detail, error_details_pb2.RetryInfo)
        if retry_info is not None:
            retry_delay_s = retry_info.retry_delay.seconds + retry_info.retry_delay.nanos / 1e9
    return ErrorDetails(reason, metadata, tuple(violations), retry_delay_s)


def _unpack(detail: AnyMessage, message_class: type[_Message]) -> _Message | None:
    message = message_class()
    return message if detail.Unpack(message) else None
