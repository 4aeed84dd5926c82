"""Keeps a panic of the tokenizer's native code from ending more than one request.

PyO3 turns a Rust panic into `PanicException`, which is no `Exception`: it would pass every handler of a server up
to the event loop. Its class cannot be imported, so it is told by its name.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from stepahead.scheduler.text.errors import TextError


@contextmanager
def panics_as(error_type: type[TextError], what: str) -> Generator[None]:
    """Raises `error_type` in place of a native panic; `what` begins its message."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise error_type(f"{what}: the tokenizer library failed: {error}") from error
