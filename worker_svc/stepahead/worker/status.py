"""gRPC statuses of the worker, with machine-readable details (google.rpc), in one place."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from google.protobuf.message import Message

ERROR_DOMAIN = "stepahead.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatus:
    """How a call ends.

    Attributes:
        code: never OK.
        reason: upper-case machine word, the ErrorInfo reason.
        message: for a person; no exception text, no paths.
        metadata: of the ErrorInfo.
        violations: (field, fault) pairs, for INVALID_ARGUMENT.
    """

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: Mapping[str, str] | None = None
    violations: Sequence[tuple[str, str]] = ()

    def to_grpc(self) -> grpc.Status:
        """The status with its details packed."""
        details: list[Message] = [
            error_details_pb2.ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN, metadata=self.metadata)
        ]
        if self.violations:
            faults = [
                error_details_pb2.BadRequest.FieldViolation(field=field, description=fault)
                for field, fault in self.violations
            ]
            details.append(error_details_pb2.BadRequest(field_violations=faults))
        packed: list[any_pb2.Any] = []
        for detail in details:
            wrapped = any_pb2.Any()
            wrapped.Pack(detail)
            packed.append(wrapped)
        # grpc.StatusCode values are (number, text) pairs.
        number: int = self.code.value[0]
        packed_status = status_pb2.Status(code=number, message=self.message, details=packed)
        return rpc_status.to_status(packed_status)  # pyright: ignore[reportUnknownMemberType] - untyped upstream


def new_incident_id() -> str:
    """Joins an INTERNAL answer to its log line."""
    return secrets.token_hex(6)


def internal_error(incident_id: str) -> StreamStatus:
    """The answer to a fault of ours: fixed text, an id to look up in the log."""
    return StreamStatus(
        code=grpc.StatusCode.INTERNAL,
        reason="INTERNAL",
        message=f"internal error, incident {incident_id}",
        metadata={"incident_id": incident_id},
    )


def invalid_argument(field: str, fault: str) -> StreamStatus:
    """The answer to a message that names something wrong."""
    return StreamStatus(
        code=grpc.StatusCode.INVALID_ARGUMENT,
        reason="INVALID_FIELD",
        message=f"{field}: {fault}",
        violations=((field, fault),),
    )
