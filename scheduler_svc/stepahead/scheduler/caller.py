"""Who calls, as far as the transport says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import grpc

from stepahead.scheduler.errors import FieldViolation, InvalidRequest

TENANT_KEY = "stepahead-tenant"
"""Metadata key. A gateway that knows its callers sets it; a server that faces clients itself has one tenant: ""."""
MAX_TENANT_CHARS = 64


@dataclass(frozen=True, slots=True)
class Caller:
    """Public request ids, fair shares and cached prefixes are a tenant's own."""

    tenant: str = ""


def caller_of(context: grpc.aio.ServicerContext[object, object]) -> Caller:
    """The caller of an RPC.

    Raises:
        InvalidRequest: the tenant's name is too long or not printable ASCII.
    """
    metadata = cast("tuple[tuple[str, str | bytes], ...] | None", context.invocation_metadata())
    for key, value in metadata or ():
        if key == TENANT_KEY:
            text = value if isinstance(value, str) else ""
            if not text or len(text) > MAX_TENANT_CHARS or not all(" " <= char <= "~" for char in text):
                description = f"must be 1 to {MAX_TENANT_CHARS} printable ASCII characters"
                raise InvalidRequest([FieldViolation(f"metadata[{TENANT_KEY}]", description)])
            return Caller(text)
    return Caller()
