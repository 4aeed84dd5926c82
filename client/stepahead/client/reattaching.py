"""What a stream does when its call breaks: the part without I/O and without a clock. Times are in seconds."""

from collections.abc import Callable
from dataclasses import dataclass

from stepahead.client.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    StepaheadError,
    UnavailableError,
    UnsupportedError,
)

# The first try follows at once: most connections break for one side only.
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0
CANCEL_TIMEOUT_S = 5.0
_SIGNS_OF_A_BREAK = ("RST_STREAM", "Internal error from Core")

# What Attach answers about a request that the server does not have, or does not have as this client saw it.
UNKNOWN_THERE = (NotFoundError, UnsupportedError, InvalidRequestError)


@dataclass(frozen=True, slots=True)
class ConnectionChange:
    """A stream has lost its connection, or has it again; `OnConnectionChange` is told.

    `request_id` is the stream's request, "" for a Multiplex stream. `error` is what broke it and `seconds_left` how
    long the stream will try to attach again; None and 0 once it is back.
    """

    request_id: str
    error: StepaheadError | None = None
    seconds_left: float = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self.error is not None


OnConnectionChange = Callable[[ConnectionChange], None]


class Reattachment:
    """Decides, break by break, whether and when to attach again.

    Tries go on for `window_s` after a break (0: there are none), which is how long the server keeps the request.
    Only news ends a break, so that a server that says no more than Started is not asked for ever. Before the first
    answer nobody knows whether the request was accepted: then one try, at once.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._was_accepted = False
        # The error that began the present break, and when it is given up.
        self._broken: StepaheadError | None = None
        self._give_up_s = 0.0
        self._num_tries = 0
        # Whether the caller has been told of a break and not yet of its end.
        self._is_told = False

    def note_answer(self, *, is_news: bool) -> None:
        """A message came; `is_news` unless it only repeats."""
        self._was_accepted = True
        if is_news:
            self._broken = None
            self._num_tries = 0

    def news_after_break(self, now_s: float) -> tuple[StepaheadError, float] | None:
        """What to tell of a break that was not told yet: its error, and the seconds until it is given up.

        A request that was never accepted has lost nothing: it has its one try, and then the error says all.
        """
        if self._broken is None or self._is_told or not self._was_accepted:
            return None
        self._is_told = True
        return self._broken, max(0.0, self._give_up_s - now_s)

    def is_back(self) -> bool:
        """Whether an answer ends a break that was told. Asked for every message, true once."""
        was_told, self._is_told = self._is_told, False
        return was_told

    def delay_after(self, error: StepaheadError, now_s: float) -> float:
        """How long to wait before attaching. Raises what ends the stream: `error`, or that of the break."""
        broken = self._broken
        if broken is not None and isinstance(error, UNKNOWN_THERE):
            raise broken from error
        if not self._window_s or not is_transport_fault(error):
            raise error
        if broken is None:
            broken = self._broken = error
            self._give_up_s = now_s + self._window_s
        tries, self._num_tries = self._num_tries, self._num_tries + 1
        delay_s = min(FIRST_DELAY_S * 2 ** (tries - 1), MAX_DELAY_S) if tries else 0.0
        if now_s + delay_s > self._give_up_s or (tries and not self._was_accepted):
            raise broken
        return delay_s


def is_transport_fault(error: StepaheadError) -> bool:
    """Whether the connection failed, not the request: the server's own errors carry details."""
    if error.reason or error.retry_delay_s is not None:
        return False
    # A stream that a proxy resets is INTERNAL to gRPC, as is much else; so is one whose end was not read before a
    # write to it failed.
    was_reset = isinstance(error, InternalError) and any(sign in error.message for sign in _SIGNS_OF_A_BREAK)
    return was_reset or isinstance(error, UnavailableError)


def leaves_request_running(error: StepaheadError) -> bool:
    """Whether a request may go on although its stream ended with this error, and is worth a Cancel.

    The server ends it by itself with its own errors and at its timeout; without a connection there is nobody to
    ask.
    """
    return not error.reason and not isinstance(error, UnavailableError | DeadlineError)
