"""Errors a client can see, and the one place where they become gRPC statuses.

ApiError
|- InvalidRequest     INVALID_ARGUMENT, BadRequest with a field path per fault
|- NotFound           NOT_FOUND, ResourceInfo
|- DuplicateRequest   ALREADY_EXISTS
|- Overloaded         RESOURCE_EXHAUSTED, QuotaFailure and RetryInfo
|- Unavailable        UNAVAILABLE, RetryInfo; the only one that invites a retry
|- DeadlineExceeded   DEADLINE_EXCEEDED, phase and tokens produced
|- RequestCancelled   CANCELLED
|- NotServed          UNIMPLEMENTED
`- InternalError      INTERNAL, fixed text and an incident id; never an exception's text
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from typing_extensions import override

DOMAIN = "stepahead"

# A status travels in HTTP/2 headers, which peers cut off at 8 KiB: one that does not fit is lost as a whole.
MAX_TEXT_BYTES = 800
MAX_DESCRIPTION_BYTES = 200
MAX_VIOLATIONS_BYTES = 2048
"""Of all violations of one request together."""


def clip(text: str, max_bytes: int) -> str:
    """The beginning of a text, at most `max_bytes` of UTF-8."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One fault of one field."""

    field: str
    """Path as in the proto, e.g. `sampling.temperature` or `chat.messages[2].role`."""
    description: str


class ApiError(Exception):
    """Base: a status code, a machine word, a sentence for a person, details."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, text: str, *, metadata: Mapping[str, str] | None = None) -> None:
        text = clip(text, MAX_TEXT_BYTES)
        super().__init__(text)
        self.text = text
        self.metadata = dict(metadata or {})

    def details(self) -> list[message.Message]:
        """google.rpc details besides ErrorInfo."""
        return []

    def to_status(self) -> status_pb2.Status:
        """The status with its details."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        packed: list[any_pb2.Any] = []
        for detail in [info, *self.details()]:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        return status_pb2.Status(code=self.code.value[0], message=self.text, details=packed)


class InvalidRequest(ApiError):
    """One or more fields are wrong; as many of them are named as fit a status."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, violations: list[FieldViolation], *, metadata: Mapping[str, str] | None = None) -> None:
        named: list[FieldViolation] = []
        size = 0
        for violation in violations:
            description = clip(violation.description, MAX_DESCRIPTION_BYTES)
            size += len(violation.field) + len(description.encode())
            if named and size > MAX_VIOLATIONS_BYTES:
                break
            named.append(FieldViolation(violation.field, description))
        text = "; ".join(f"{violation.field}: {violation.description}" for violation in named)
        if len(named) < len(violations):
            text = f"{len(violations)} faults: {text}"
        super().__init__(text, metadata=metadata)
        self.violations = named

    @override
    def details(self) -> list[message.Message]:
        return [
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
                    for v in self.violations
                ]
            )
        ]


class NotFound(ApiError):
    """No such model or request."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.name = clip(name, MAX_DESCRIPTION_BYTES)

    @override
    def details(self) -> list[message.Message]:
        return [
            error_details_pb2.ResourceInfo(resource_type=self.kind, resource_name=self.name, description=self.text)
        ]


class DuplicateRequest(ApiError):
    """A live request has the same id and another body."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST_ID"


class _Retryable(ApiError):
    def __init__(self, text: str, *, retry_delay_ms: int, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(text, metadata=metadata)
        self.retry_delay_ms = retry_delay_ms

    @override
    def details(self) -> list[message.Message]:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(self.retry_delay_ms)
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


class Overloaded(_Retryable):
    """A queue or quota is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"

    @override
    def details(self) -> list[message.Message]:
        quota = error_details_pb2.QuotaFailure.Violation(subject="waiting requests", description=self.text)
        return [error_details_pb2.QuotaFailure(violations=[quota]), *super().details()]


class Unavailable(_Retryable):
    """Not ready, draining, or the last worker was lost."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, reason: str, text: str, *, retry_delay_ms: int = 1000) -> None:
        super().__init__(text, retry_delay_ms=retry_delay_ms)
        self.reason = reason


class DeadlineExceeded(ApiError):
    """A deadline of the request passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE"


class RequestCancelled(ApiError):
    """Ended by Cancel."""

    code = grpc.StatusCode.CANCELLED
    reason = "REQUEST_CANCELLED"


class NotServed(ApiError):
    """The protocol has it, this server does not do it yet."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NOT_SERVED"


class InternalError(ApiError):
    """Our bug. The text is fixed; the incident id leads to the log."""

    def __init__(self, incident: str) -> None:
        super().__init__("internal error; see the server log for the incident", metadata={"incident": incident})


class RowFailed(ApiError):
    """The model produced no usable distribution for this request; others are untouched."""

    code = grpc.StatusCode.INTERNAL
    reason = "ROW_FAILED"


class NothingAllowed(ApiError):
    """The request's own restrictions contradict each other at some place of the answer (rule I7)."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "NOTHING_ALLOWED"

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"after {num_tokens} tokens nothing may be sampled: the request's constraint, min_tokens, logit_bias, "
            "bad_words and allowed_token_ids leave no token together",
            metadata={"fault": "nothing_allowed", "output_tokens": str(num_tokens)},
        )


async def abort(context: grpc.aio.ServicerContext[object, object], failure: list[ApiError]) -> NoReturn:
    """Ends an RPC with an error's status and details. Never returns.

    Args:
        context: of the RPC.
        failure: the error alone, and empty afterwards: grpcio keeps its own exception in a cycle with the frames it
            came through, so what they know would only go with the collector's next look at everything.
    """
    status = rpc_status.to_status(failure.pop().to_status())  # pyright: ignore[reportUnknownMemberType]
    # `abort_with_status` of asyncio servers raises; trailing metadata carries the details.
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")
