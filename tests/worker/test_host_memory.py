"""What is left of the host's memory, and what this process gives back."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest

from stepahead.worker.host_memory import available_memory_bytes, release_unused_memory

PIECE_BYTES = 100_000  # too small for a mapping of its own
HELD_MIB = 60


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096 / 2**20


def test_available_memory_is_read() -> None:
    assert available_memory_bytes() > 1 << 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_pieces_go_back_to_the_system() -> None:
    kept: list[bytearray] = []

    def use_and_free() -> None:
        pieces = [bytearray(b"1") * PIECE_BYTES for _ in range((HELD_MIB << 20) // PIECE_BYTES)]
        kept.append(pieces[-1])  # the top of the arena stays in use: nothing below goes back by itself
        del pieces

    thread = threading.Thread(target=use_and_free)
    thread.start()
    thread.join()
    before = resident_mib()
    release_unused_memory()
    assert before - resident_mib() > 0.8 * HELD_MIB
    assert len(kept) == 1
