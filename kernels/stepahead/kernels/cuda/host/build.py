"""Compiles a kernel module for the host with g++, into the same cache as the CPU step library."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from stepahead.kernels.cpu.step.build import cache_directory
from stepahead.kernels.cuda.errors import KernelBuildError, KernelUnavailable
from stepahead.kernels.cuda.sources import SOURCE_DIRECTORY, Module, declarations, sources_digest

_SUPPORT_DIRECTORY = Path(__file__).parent / "csrc"
# Contraction would round where the GPU's explicit operations do not; kernels read floats through integer pointers.
_FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=hidden"),
    *(f"-I{_SUPPORT_DIRECTORY}", f"-I{SOURCE_DIRECTORY}"),
)
_CHECKED_FLAGS = ("-DCHECKED", "-fsanitize=thread")


def built_module(module: Module, *, checked: bool) -> Path:
    """Returns a shared library with the module's kernels, compiled unless the cache holds it.

    Args:
        module: source and constants.
        checked: with checks of bounds and races on every access (about 30 times slower).

    Raises:
        KernelUnavailable: other machine than x86-64 Linux, or no g++.
        KernelBuildError: the source does not compile.
    """
    names = [kernel.name for kernel in declarations(module.source)]
    exports = "\n".join(f"EXPORT_KERNEL({name})" for name in names)
    # The anonymous namespace keeps what several modules call by one name apart.
    text = f'#include "cuda_on_host.h"\nnamespace {{\n#include "{module.source}.cu"\n}}\n{exports}\n'
    flags = (*_FLAGS, *(_CHECKED_FLAGS if checked else ()), *module.definitions)
    path = _cached_path(module.source, ".so", text, *flags)
    if not path.exists():
        # The run time sees the accesses of a kernel, not its own: it is compiled without the sanitizer's calls.
        runtime = _object(_SUPPORT_DIRECTORY / "runtime.cpp", "-DCHECKED" if checked else "-UCHECKED")
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            source, made, linked = (Path(directory) / f"module{suffix}" for suffix in (".cpp", ".o", ".so"))
            source.write_text(text, encoding="utf-8")
            _run([_compiler(), *flags, "-c", str(source), "-o", str(made)])
            _run([_compiler(), "-shared", str(made), str(runtime), "-o", str(linked)])
            linked.replace(path)  # on one file system: a reader sees all of it or nothing
    return path


def _object(source: Path, definition: str) -> Path:
    path = _cached_path(source.stem, ".o", *_FLAGS, definition)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / "object.o"
            _run([_compiler(), *_FLAGS, definition, "-c", str(source), "-o", str(made)])
            made.replace(path)
    return path


def _cached_path(stem: str, suffix: str, *key: str) -> Path:
    folder = cache_directory() / "host"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\0".join((sources_digest(), _support_digest(), _compiler_version(), *key)).encode())
    return folder / f"{stem}-{digest.hexdigest()[:24]}{suffix}"


@cache
def _support_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(_SUPPORT_DIRECTORY.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _compiler() -> str:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        message = f"kernels run on x86-64 Linux hosts, this is {sys.platform} on {platform.machine()}"
        raise KernelUnavailable(message)
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise KernelUnavailable(f"there is no compiler {name!r}")
    return path


@cache
def _compiler_version() -> str:
    return _run([_compiler(), "--version"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelBuildError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
