"""The scheduler's event loop: uvloop, which leaves room for the threads that it depends on.

*Wake-ups.* For every operation that completes, grpc.aio's thread writes a byte to a socket, and whoever reads it
takes one byte and hands out all that has completed. Where hundreds complete at once, hundreds of bytes stay, and
cost twice:

    loop      each byte is a pass of the loop that finds nothing, and the loop does not sleep between them
    thread    after 278 the socket is full: the thread waits until three quarters of them have been read, a byte per
              pass, and all completions wait with it: also a boundary, which is read from the same queue

So all bytes but one are taken before that one's events are handed out. An event is queued before its byte is
written: what is taken here stands for nothing that is handed out later.

*Breath.* A loop that has always something to do never leaves its core, and a thread that waits behind it there, one
of gRPC's or one of a worker on the same machine, waits for the kernel to intervene: 4 ms at best, 30 where the
other process has most of its threads elsewhere. So a loop that has run for a while without a pause makes one.
"""

from __future__ import annotations

import functools
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import uvloop
from typing_extensions import override

WAKE_UPS = 4096
"""Bytes taken at once, at most: more than a socket holds."""
BREATH_AFTER_S = 0.001
"""So long the loop runs without a pause. A step of a fast device takes 2 to 5 ms."""
BREATH_S = 20e-6
"""A pause, with 50 us more by the kernel's clock: what a thread of gRPC needs to hand a message on."""


class CalmLoop(uvloop.Loop):
    """See the module docstring."""

    @override
    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        """As every loop's; grpc.aio's reader of wake-ups is called once for all that wait."""
        if isinstance(fd, socket.socket) and is_completion_reader(callback):
            callback = functools.partial(_read_wake_ups, fd, callback, Breath())
        super().add_reader(fd, callback, *args)


def is_completion_reader(callback: object) -> bool:
    """Whether it is grpc.aio's reader of wake-ups. grpcio has no name for it that is not private."""
    function = getattr(callback, "func", callback)
    return type(getattr(function, "__self__", None)).__name__ == "PollerCompletionQueue"


class Breath:
    """Pauses a thread that has run for too long without one. Linux only; elsewhere it does nothing."""

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._num_pauses = _num_pauses()

    def take_if_due(self) -> None:
        """Called whenever a pause would do no harm."""
        if time.monotonic() - self._looked_at < BREATH_AFTER_S:
            return
        num_pauses = _num_pauses()
        if num_pauses is not None and num_pauses == self._num_pauses:
            time.sleep(BREATH_S)
        self._num_pauses = _num_pauses()
        self._looked_at = time.monotonic()


def _num_pauses() -> int | None:
    """Times that this thread has left its core by itself, as when it waits for something; None: nobody counts."""
    who = getattr(resource, "RUSAGE_THREAD", None)
    return None if who is None else resource.getrusage(who).ru_nvcsw


def _read_wake_ups(wake_ups: socket.socket, read_one: Callable[..., Any], breath: Breath, *args: object) -> None:
    breath.take_if_due()
    try:
        num_waiting = len(wake_ups.recv(WAKE_UPS, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return  # read already
    if num_waiting > 1:
        wake_ups.recv(num_waiting - 1)
    read_one(*args)
