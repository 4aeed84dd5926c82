"""The files of a model in several GGUF files: NAME-00001-of-00003.gguf and so on, as llama.cpp splits them.

The first file holds the metadata of the whole model, every file some of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepahead.worker.errors import ModelError

if TYPE_CHECKING:
    import gguf

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def first_file(path: Path) -> Path:
    """Returns the first file of the model that a GGUF file belongs to, by name: `path` itself if it is alone."""
    part = _PART.fullmatch(path.name)
    return path if part is None else path.with_name(f"{part[1]}-{1:05d}-of-{part[3]}.gguf")


def model_name(path: Path) -> str:
    """Returns the file's name without its extension and without which part it is."""
    part = _PART.fullmatch(path.name)
    return path.stem if part is None else part[1]


def part_files(path: Path) -> list[Path]:
    """Returns all files of a model, in order.

    Args:
        path: the model's only file, or its first.

    Raises:
        ModelError: a file is missing, or `path` is a later one.
    """
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    if path != first_file(path):
        raise ModelError(f"{path} is part {int(part[2])} of a model in {int(part[3])} files; name the first")
    count = int(part[3])
    files = [path.with_name(f"{part[1]}-{number:05d}-of-{part[3]}.gguf") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{path}: of the model's {count} files {', '.join(missing)} are missing beside it")
    return files


def check_parts(files: Sequence[Path], readers: Sequence[gguf.GGUFReader]) -> None:
    """Checks what the files say of themselves against their names.

    Raises:
        ModelError: a file says that it is another part, or tensors are missing or held twice.
    """
    for index, (file, reader) in enumerate(zip(files, readers, strict=True)):
        number, count = _number(reader, "split.no", index), _number(reader, "split.count", len(files))
        if (number, count) != (index, len(files)):
            raise ModelError(
                f"{file} says that it is part {number + 1} of {count} (split.no, split.count); it is read as part "
                f"{index + 1} of {len(files)}: parts must be named NAME-00001-of-{count:05d}.gguf and so on"
            )
    names = [tensor.name for reader in readers for tensor in reader.tensors]
    expected = _number(readers[0], "split.tensors.count", len(names))
    if len(names) != expected or len(set(names)) != expected:
        raise ModelError(
            f"{files[0]} speaks of {expected} tensors (split.tensors.count), its files hold {len(names)}"
        )


def _number(reader: gguf.GGUFReader, key: str, otherwise: int) -> int:
    field = reader.get_field(key)
    return otherwise if field is None else int(field.contents())
