"""Opens GGUF files, and says what is wrong with one. Needs no torch."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
from typing_extensions import override

from stepahead.worker.errors import ModelError
from stepahead.worker.model.file_sizes import cut_short, why_not_whole

_TYPES = gguf.GGMLQuantizationType


class _CutShort(Exception):
    """The file should have this many bytes."""

    def __init__(self, expected_bytes: int) -> None:
        super().__init__(f"{expected_bytes} bytes")
        self.expected_bytes = expected_bytes


def _end_of(field: gguf.ReaderField) -> int:
    """Where a tensor ends, in bytes from the first tensor's begin."""
    _, _, _, dimensions, kind, offset = field.parts
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[_TYPES(kind[0])]
    num_elements = math.prod(int(size) for size in dimensions)
    return int(offset[0]) + num_elements * block_bytes // block_size


class PlainReader(gguf.GGUFReader):
    """The package's reader over a plain array: its million slices of a `memmap` cost three times more.

    Raises _CutShort where the file ends before its last tensor does.
    """

    @override
    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        """Looks at the tensors after their places in the file: slices of what is missing are merely short."""
        expected_bytes = max((start_offs + _end_of(field) for field in fields), default=0)
        if len(self.data) < expected_bytes:
            raise _CutShort(expected_bytes)
        super()._build_tensors(start_offs, fields)

    @override
    def __setattr__(self, name: str, value: object) -> None:
        """Stores the file's mapping as a view without the subclass."""
        object.__setattr__(self, name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)


def read_gguf(path: Path) -> PlainReader:
    """Returns a file's metadata and the places of its tensors.

    Raises:
        ModelError: it is damaged, cut short, or no GGUF file.
    """
    try:
        return PlainReader(path)
    except _CutShort as error:
        raise ModelError(cut_short(path, error.expected_bytes)) from error
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(why_not_whole(path) or _unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    # The reader's own words are about versions; without the header's end, NumPy speaks of sizes and indexes.
    if not is_gguf or "version" in str(error):
        return f"{path} cannot be read as GGUF: {error}"
    return (
        f"{path} cannot be read as GGUF: its header is damaged or cut short, {path.stat().st_size:,} bytes in all "
        f"({error}); download it again"
    )
