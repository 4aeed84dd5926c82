"""The size of a Multiplex message, with everything pending at once."""

from __future__ import annotations

from typing import Any, cast

from stepahead.scheduler.errors import FieldViolation, InvalidRequest
from stepahead.scheduler.multiplex import MAX_LIVE, MAX_MESSAGE_BYTES, MultiplexSession


async def test_failures_of_all_requests_of_a_stream_come_in_several_messages() -> None:
    """At most 1 MiB a message: a client refuses more than 4 MiB, and the stream would be lost."""
    session = MultiplexSession(cast(Any, None), cast(Any, None))
    error = InvalidRequest([FieldViolation(f"field_{index}", "x" * 500) for index in range(30)])
    for handle in range(MAX_LIVE):
        session._fail(handle, error)
    handles: list[int] = []
    while (response := session._take()) is not None:
        assert response.ByteSize() <= MAX_MESSAGE_BYTES
        handles += [failure.handle for failure in response.failures]
    assert handles == list(range(MAX_LIVE))
