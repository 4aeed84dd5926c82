"""The kernel sources, and what the text of a source says about its kernels."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from typing_extensions import override

SOURCE_DIRECTORY = Path(__file__).parent / "csrc"
_KERNEL = re.compile(r"^KERNEL\((?P<threads>\w+), (?P<registers>\d+)\)\s*\n?(?P<name>\w+)\(", re.MULTILINE)
_CONSTANT = re.compile(r"^#define (?P<name>\w+) (?P<value>\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class Module:
    """A source and the constants it is compiled with: one compilation, one binary."""

    source: str
    """File name in csrc, without `.cu`."""
    constants: tuple[tuple[str, str | int], ...] = ()

    @override
    def __str__(self) -> str:
        values = " ".join(str(value) for _, value in self.constants)
        return f"{self.source} {values}".rstrip()

    @property
    def definitions(self) -> tuple[str, ...]:
        """Compiler options that define the constants."""
        return tuple(f"-D{name}={value}" for name, value in self.constants)


@dataclass(frozen=True, slots=True)
class KernelDeclaration:
    """What a source says of one kernel."""

    name: str
    max_threads: int
    register_budget: int
    """Registers a thread may need, for every architecture and every set of constants."""


def source_text(source: str) -> str:
    """Returns the text of `csrc/<source>.cu`."""
    return (SOURCE_DIRECTORY / f"{source}.cu").read_text(encoding="utf-8")


@cache
def declarations(source: str) -> tuple[KernelDeclaration, ...]:
    """Returns the kernels of a source, in its order."""
    text = source_text(source)
    values = {match["name"]: int(match["value"]) for match in _CONSTANT.finditer(text)}
    return tuple(
        KernelDeclaration(
            name=match["name"],
            max_threads=int(match["threads"]) if match["threads"].isdigit() else values[match["threads"]],
            register_budget=int(match["registers"]),
        )
        for match in _KERNEL.finditer(text)
    )


def source_names() -> tuple[str, ...]:
    """Returns the names of all sources."""
    return tuple(sorted(path.stem for path in SOURCE_DIRECTORY.glob("*.cu")))


@cache
def sources_digest() -> str:
    """Returns a digest of every source and header: a binary of another text is another file."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIRECTORY.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
