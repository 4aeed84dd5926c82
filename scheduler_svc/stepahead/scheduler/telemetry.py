"""Structured logs: one canonical line per event, to stderr, as text or JSON. Never the text of a prompt."""

from __future__ import annotations

import logging
import secrets
import sys

import structlog


def configure_logs(log_format: str) -> None:
    """Sets up structlog once per process. `log_format` is "console" or "json"."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
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


def incident_id() -> str:
    """Joins an INTERNAL status with its log line."""
    return secrets.token_hex(6)
