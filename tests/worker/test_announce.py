"""Start-up events for a parent process."""

from __future__ import annotations

import json
import os

from stepahead.worker.announce import Announcer


def test_events_are_json_lines() -> None:
    read_fd, write_fd = os.pipe()
    announcer = Announcer(write_fd)
    announcer.listening("127.0.0.1:5")
    announcer.failed('no "model"')
    os.close(write_fd)
    with os.fdopen(read_fd) as lines:
        assert [json.loads(line) for line in lines] == [
            {"event": "listening", "address": "127.0.0.1:5"},
            {"event": "failed", "message": 'no "model"'},
        ]


def test_progress_is_thinned_out_and_always_ends_complete() -> None:
    read_fd, write_fd = os.pipe()
    announcer = Announcer(write_fd)
    for done in range(1001):
        announcer.progress("weights", done, 1000)
    os.close(write_fd)
    with os.fdopen(read_fd) as lines:
        events = [json.loads(line) for line in lines]
    assert events[-1] == {"event": "progress", "what": "weights", "done": 1000, "total": 1000}
    assert len(events) < 500


def test_a_parent_that_went_away_does_not_stop_the_worker() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    announcer = Announcer(write_fd)
    announcer.listening("127.0.0.1:5")
    announcer.failed("again")
    os.close(write_fd)


def test_without_a_descriptor_nothing_is_written() -> None:
    Announcer(None).listening("127.0.0.1:5")
