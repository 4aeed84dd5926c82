"""Model files that are not whole: a download that broke off, or what Git LFS leaves in place of a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

_LFS_POINTER = re.compile(rb"version https://git-lfs[^\n]*\n(?:[^\n]*\n)*?size (\d+)\n")
# No header of a model is larger; what says so is no safetensors file.
_MAX_HEADER_BYTES = 1 << 30


def cut_short(path: Path, expected_bytes: int) -> str:
    """What to say of a file that ends too early: both sizes, and the way out."""
    return (
        f"{path} is cut short: it has {path.stat().st_size:,} bytes and should have {expected_bytes:,}; "
        f"download it again"
    )


def why_not_whole(path: Path) -> str | None:
    """What is wrong with a model file that could not be read, if it is not whole; None: something else is wrong.

    A safetensors file and a pointer of Git LFS say their size. Raises OSError.
    """
    with path.open("rb") as file:
        begin = file.read(1024)
    pointer = _LFS_POINTER.match(begin)
    if pointer:
        return (
            f"{path} is a pointer of Git LFS to a file of {int(pointer[1]):,} bytes, not the file: "
            f"fetch it with `git lfs pull`, or download it"
        )
    if not begin:
        return f"{path} is empty; download it again"
    expected_bytes = _safetensors_bytes(path) if path.suffix == ".safetensors" else None
    if expected_bytes is not None and path.stat().st_size < expected_bytes:
        return cut_short(path, expected_bytes)
    return None


def _safetensors_bytes(path: Path) -> int | None:
    """The size that a safetensors file states, or that of its header where that is not whole; None: it states none.

    The format is 8 bytes of the header's length, the header in JSON, and the tensors' bytes, whose ends it names.
    """
    with path.open("rb") as file:
        begin = file.read(8)
        if len(begin) < 8:
            return 8
        header_bytes = int.from_bytes(begin, "little")
        if header_bytes > _MAX_HEADER_BYTES:
            return None
        header = file.read(header_bytes)
    if len(header) < header_bytes:
        return 8 + header_bytes
    try:
        entries = cast("dict[str, dict[str, list[int]]]", json.loads(header))
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return 8 + header_bytes + max(ends, default=0)
