"""Keeps what the tokenizer's native code raises from ending more than one request.

Its errors are bare `Exception`s, such as that of a word outside a vocabulary without an unknown token.

PyO3 turns a Rust panic into `PanicException`, which is no `Exception`: it would pass every handler of a server up
to the event loop. Its class cannot be imported, so it is told by its name.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from stepahead.scheduler.text.errors import TextError


@contextmanager
def panics_as(error_type: type[TextError], what: str) -> Generator[None]:
    """Raises `error_type` in place of a native panic or error; `what` begins its message."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception:
            raise error_type(f"{what}: the tokenizer cannot take it: {error}") from error
        if type(error).__name__ != "PanicException":
            raise
        raise error_type(f"{what}: the tokenizer library failed: {error}") from error
