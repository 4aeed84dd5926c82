"""Tells a parent process how start-up goes: JSON lines on a file descriptor, or a progress bar for a person."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from stepahead.worker.cache_sizing import cache_bytes, describe_groups

if TYPE_CHECKING:
    from stepahead.worker.runner import CacheShape, ModelFacts

PROGRESS_INTERVAL_NS = 100_000_000


class Announcer:
    """Writes start-up events.

    Args:
        announce_fd: where JSON lines go; None: nowhere, and a terminal on stderr gets a progress bar.
    """

    def __init__(self, announce_fd: int | None) -> None:
        self._fd = announce_fd
        self._last_progress_ns = 0
        self._bar: Progress | None = None
        self._bar_task: TaskID | None = None
        if announce_fd is None and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def listening(self, address: str) -> None:
        """The listener is open; the model is still loading."""
        self._write(event="listening", address=address)

    def progress(self, what: str, done: int, total: int) -> None:
        """Bytes loaded so far; at most ten lines a second, and the last one. Any one thread may call it."""
        now_ns = time.monotonic_ns()
        if done < total and now_ns - self._last_progress_ns < PROGRESS_INTERVAL_NS:
            return
        self._last_progress_ns = now_ns
        self._write(event="progress", what=what, done=done, total=total)
        if self._bar is not None:
            if self._bar_task is None:
                self._bar.start()
                self._bar_task = self._bar.add_task(f"loading {what}", total=total)
            self._bar.update(self._bar_task, completed=done, total=total)

    def ready(self, facts: ModelFacts, shape: CacheShape, num_concurrent: float) -> None:
        """Sessions are accepted. `num_concurrent`: sequences of max_model_len that the cache holds at once."""
        self._close_bar()
        self._write(
            event="ready",
            model=facts.name,
            device=facts.device,
            dtype=facts.dtype,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            weight_bytes=facts.weight_bytes,
            stored_weight_bytes=facts.weight_bytes
            if facts.stored_weight_bytes is None
            else facts.stored_weight_bytes,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            kv_cache_bytes=sum(cache_bytes(shape, facts)),
            kv_groups=describe_groups(shape),
            num_concurrent=round(num_concurrent, 2),
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
        )

    def failed(self, message: str) -> None:
        """The process ends; `message` is for a person."""
        self._close_bar()
        self._write(event="failed", message=message)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _write(self, **fields: object) -> None:
        if self._fd is None:
            return
        line = (json.dumps(fields, separators=(",", ":")) + "\n").encode()
        try:
            os.write(self._fd, line)
        except BrokenPipeError:
            self._fd = None  # the parent stopped listening; the worker goes on
