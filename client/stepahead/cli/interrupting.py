"""What Ctrl-C, SIGTERM and SIGHUP do to a request: cancel it, then end the command as they would have.

The default handler of Ctrl-C raises KeyboardInterrupt wherever the main thread happens to be: inside of grpc it can
leave a lock held, and the command hangs for ever. SIGTERM and SIGHUP would end the process and leave the request
running on the server until its re-attach window is over. Here a signal only cancels the stream, from a thread of
its own, and reading the stream ends by itself.
"""

import asyncio
import signal
import threading
from collections.abc import Coroutine, Generator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

from stepahead.client import RequestCancelledError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Cancellable(Protocol):
    """A stream that is being read."""

    def cancel(self) -> None:
        """Ends it, from any thread; the reader gets RequestCancelledError."""
        ...


_S = TypeVar("_S", bound=Cancellable)
_T = TypeVar("_T")


class _Guard:
    """Cancels a stream once, when a signal has come and the stream is there."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._stream: Cancellable | None = None
        self._cancelling: threading.Thread | None = None

    def on_signal(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        self._cancel()

    def watch(self, stream: Cancellable) -> None:
        self._stream = stream
        self._cancel()

    def join(self) -> None:
        """Before the channel closes under the thread that cancels."""
        if self._cancelling is not None:
            self._cancelling.join()

    def _cancel(self) -> None:
        if self.received and self._stream is not None and self._cancelling is None:
            # Not here: the main thread may hold what `cancel` needs.
            self._cancelling = threading.Thread(target=self._stream.cancel, name="stepahead-cancel", daemon=True)
            self._cancelling.start()


@contextmanager
def cancelled_by_signals(opening: AbstractContextManager[_S]) -> Generator[_S]:
    """Opens a stream that a signal cancels. Main thread only; ignored signals (nohup) stay ignored.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: with 128 + the signal's number, after another one.
    """
    guard = _Guard()
    kept = {each: signal.getsignal(each) for each in _heeded()}
    for each in kept:
        signal.signal(each, guard.on_signal)
    try:
        # Opening is inside: it takes locks of grpc, too.
        with opening as stream:
            guard.watch(stream)
            try:
                yield stream
            finally:
                guard.join()
    except RequestCancelledError:
        if not guard.received:
            raise
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
    if guard.received:
        raise _end_of(guard.received[0])


def run_until_signal(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs asyncio work in a loop of its own; the first signal cancels it. Otherwise as `cancelled_by_signals`."""
    received: list[int] = []

    async def run() -> _T:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(work)

        def on_signal(number: int) -> None:
            # A second one must not end the wait for the server to hear of the first.
            if not received:
                task.cancel()
            received.append(number)

        for each in _heeded():
            loop.add_signal_handler(each, on_signal, each)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if not received:
            raise
        raise _end_of(received[0]) from None


def _heeded() -> list[signal.Signals]:
    return [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]


def _end_of(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
