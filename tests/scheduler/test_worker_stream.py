"""When a session waits no longer to be resumed."""

from __future__ import annotations

import pytest

from stepahead.scheduler.worker_stream import EpochClosed, Refusals, StreamNotOpened

REFUSED = StreamNotOpened("UNAVAILABLE", "failed to connect: ipv4:10.0.0.1:1: Connection refused")
SILENT = StreamNotOpened("DEADLINE_EXCEEDED", "no answer within 5.0 s")


def test_a_worker_whose_port_stays_closed_is_gone() -> None:
    refusals = Refusals()
    refusals.note(REFUSED, 10.0)
    refusals.note(REFUSED, 10.9)
    with pytest.raises(EpochClosed, match="nothing listens"):
        refusals.note(REFUSED, 11.0)


def test_a_network_that_is_down_is_waited_for() -> None:
    """A proxy that refuses for a moment, too; and a stream that stood begins the count anew."""
    refusals = Refusals()
    for now_s in range(20):
        refusals.note(SILENT, float(now_s))
    refusals.note(REFUSED, 20.0)
    refusals.note(SILENT, 20.9)
    refusals.note(REFUSED, 21.5)
    refusals.forget()
    refusals.note(REFUSED, 22.6)
    refusals.note(REFUSED, 23.5)
