"""Waiting for the boundaries that a worker still owes (DrainSteps and Drained)."""

from __future__ import annotations

import asyncio

from stepahead.v1 import worker_pb2


class Flushes:
    """The flushes of one session that have not been answered."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._last_nonce = 0

    def begin(self) -> tuple[worker_pb2.RunStepsRequest, asyncio.Future[None]]:
        """What to send, and what is done when it is answered or the session is over."""
        self._last_nonce += 1
        flushed = self._waiting[self._last_nonce] = asyncio.get_running_loop().create_future()
        return _message(self._last_nonce), flushed

    def unanswered(self) -> list[worker_pb2.RunStepsRequest]:
        """What to send again on a new stream."""
        return [_message(nonce) for nonce in self._waiting]

    def answer(self, nonce: int) -> None:
        """Everything accepted before that flush has been settled. Harmless for a nonce that was answered."""
        flushed = self._waiting.pop(nonce, None)
        if flushed is not None and not flushed.done():  # whoever waited may have gone
            flushed.set_result(None)

    def end(self) -> None:
        """The session is over: its worker owes nothing any more."""
        for nonce in list(self._waiting):
            self.answer(nonce)


def _message(nonce: int) -> worker_pb2.RunStepsRequest:
    return worker_pb2.RunStepsRequest(drain=worker_pb2.DrainSteps(nonce=nonce))
