"""Errors as statuses: code, machine word, details, and a size that fits a header."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from stepahead.scheduler.errors import (
    ApiError,
    DeadlineExceeded,
    DuplicateRequest,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NotFound,
    NotServed,
    Overloaded,
    RequestCancelled,
    RowFailed,
    Unavailable,
    clip,
)

HEADER_LIMIT_BYTES = 8 * 1024

CASES: list[tuple[ApiError, grpc.StatusCode, str]] = [
    (InvalidRequest([FieldViolation("a", "b")]), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    (NotFound("model", "m", "no such"), grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    (DuplicateRequest("twice"), grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    (Overloaded("full", retry_delay_ms=1500), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (Unavailable("DRAINING", "later"), grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    (DeadlineExceeded("late", metadata={"phase": "run"}), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE"),
    (RequestCancelled("gone"), grpc.StatusCode.CANCELLED, "REQUEST_CANCELLED"),
    (NotServed("not yet"), grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED"),
    (InternalError("abc"), grpc.StatusCode.INTERNAL, "INTERNAL"),
    (RowFailed("nan"), grpc.StatusCode.INTERNAL, "ROW_FAILED"),
]


def detail(error: ApiError, kind: type[Message]) -> Any:
    for packed in error.to_status().details:
        message = kind()
        if packed.Unpack(message):
            return message
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize(("error", "code", "reason"), CASES, ids=[case[2] for case in CASES])
def test_every_error_has_a_code_a_word_and_a_sentence(error: ApiError, code: grpc.StatusCode, reason: str) -> None:
    status = error.to_status()
    assert (status.code, status.message) == (code.value[0], str(error))
    info = detail(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == (reason, "stepahead", error.metadata)
    assert status.message


def test_details_of_each_kind() -> None:
    bad = detail(InvalidRequest([FieldViolation("x.y[2]", "is wrong")]), error_details_pb2.BadRequest)
    assert [(each.field, each.description) for each in bad.field_violations] == [("x.y[2]", "is wrong")]
    assert detail(NotFound("model", "m", "t"), error_details_pb2.ResourceInfo).resource_name == "m"
    full = Overloaded("full", retry_delay_ms=1500)
    assert detail(full, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500
    assert detail(full, error_details_pb2.QuotaFailure).violations[0].subject
    assert (
        detail(Unavailable("X", "t", retry_delay_ms=7), error_details_pb2.RetryInfo).retry_delay.nanos == 7_000_000
    )


def test_an_internal_error_says_nothing_but_the_incident() -> None:
    error = InternalError("abc123")
    assert error.metadata == {"incident": "abc123"}
    assert "abc123" not in error.text


def test_more_faults_than_fit_are_counted() -> None:
    error = InvalidRequest([FieldViolation(f"chat.messages[{index}].role", "is wrong") for index in range(4000)])
    assert 1 <= len(error.violations) < 100
    assert error.violations[0].field == "chat.messages[0].role"
    assert error.text.startswith("4000 faults: chat.messages[0].role: is wrong")


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b[3].c"]), st.text(max_size=2000)), min_size=1, max_size=60),
    st.text(max_size=3000),
)
def test_every_status_fits_a_header(faults: list[tuple[str, str]], text: str) -> None:
    for error in (
        InvalidRequest([FieldViolation(field, description) for field, description in faults]),
        NotFound("model", text, text),
        Unavailable("DRAINING", text),
    ):
        status = error.to_status()
        # grpc-message escapes up to three characters a byte; the details travel in base64.
        assert 3 * len(status.message.encode()) + status.ByteSize() * 4 // 3 < HEADER_LIMIT_BYTES


@given(st.text(max_size=300), st.integers(10, 100))
def test_clip_keeps_the_beginning(text: str, max_bytes: int) -> None:
    clipped = clip(text, max_bytes)
    assert len(clipped.encode()) <= max_bytes
    assert clipped == text or (clipped.endswith("...") and text.startswith(clipped[:-3]))
