"""Log lines."""

from __future__ import annotations

import structlog

from stepahead.scheduler.telemetry import render_plain


def test_a_plain_line_is_that_of_the_console_renderer() -> None:
    """Values with blanks and empty ones included; an exception follows on lines of its own."""

    def event() -> structlog.typing.EventDict:
        fields = {"status": "OK", "text": "two words", "empty": "", "queue_ms": 1.25, "workers": ["a", "b"]}
        return {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "event": "request ended", **fields}

    console = structlog.dev.ConsoleRenderer(colors=False, sort_keys=False)
    assert render_plain(None, "info", event()) == console(None, "info", event())
    failed = render_plain(None, "error", {**event(), "exception": "Traceback\n  ValueError"})
    assert failed.splitlines()[1:] == ["Traceback", "  ValueError"]
    assert failed.splitlines()[0] == render_plain(None, "info", event())
