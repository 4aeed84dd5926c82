"""Long computations without coverage's tracer: what they run is covered by tests of its own, or is not ours."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def untraced() -> Generator[None]:
    """Takes this thread's tracer away; calls that began before keep being traced where they go on."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)
