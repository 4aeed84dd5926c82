"""Structured logs: one canonical line per event, to stderr, as text or JSON. Never the text of a prompt."""

from __future__ import annotations

import logging
import re
import secrets
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_NEEDS_QUOTES = re.compile(r"[\s='\"]").search


def configure_logs(log_format: str) -> None:
    """Sets up structlog once per process. `log_format` is "console" or "json"."""
    renderer: structlog.typing.Processor = render_plain
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    elif sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def render_plain(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    """A line like those of structlog's console renderer, at a third of the cost: every request has one."""
    head = f"{event.pop('timestamp')} [{event.pop('level'):<9}] {event.pop('event'):<30}"
    exception = event.pop("exception", None)
    line = " ".join([head, *[f"{name}={_shown(value)}" for name, value in event.items()]]).rstrip()
    return line if exception is None else f"{line}\n{exception}"


def _shown(value: object) -> str:
    return value if isinstance(value, str) and not _NEEDS_QUOTES(value) else repr(value)


def incident_id() -> str:
    """Joins an INTERNAL status with its log line."""
    return secrets.token_hex(6)
