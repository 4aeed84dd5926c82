"""NVRTC, NVIDIA's run-time compiler, called through its C interface: no driver and no CUDA headers needed.

The library comes in the wheel `nvidia-cuda-nvrtc`. Source: the NVRTC documentation, "Basic usage"; what ptxas
reports is in the program log when the option `--ptxas-options=-v` asks for it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stepahead.kernels.cuda.errors import KernelBuildError, KernelUnavailable
from stepahead.kernels.cuda.sources import SOURCE_DIRECTORY, Module, source_text

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""A100, H100/H200 and B200: what the sources are compiled for in the continuous integration."""

_OPTIONS = ("--std=c++17", "--ptxas-options=-v", f"--include-path={SOURCE_DIRECTORY}")
_FUNCTION = re.compile(r"Compiling entry function '(?P<name>\w+)'")
_MEMORY = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes")
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")
_SHARED = re.compile(r"(?P<shared>\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one compiled kernel needs."""

    name: str
    registers: int
    """A thread."""
    spill_bytes: int
    """A thread, stores and loads."""
    stack_bytes: int
    """A thread."""
    shared_bytes: int
    """A block, without what a launch adds."""


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """A binary for one architecture."""

    cubin: bytes
    kernels: tuple[KernelResources, ...]


def compile_module(module: Module, architecture: str) -> CompiledModule:
    """Compiles a module to machine code.

    Args:
        module: source and constants.
        architecture: such as "sm_90".

    Raises:
        KernelUnavailable: NVRTC is not installed.
        KernelBuildError: the source does not compile.
    """
    return compile_text(source_text(module.source), str(module), architecture, module.definitions)


def compile_text(text: str, name: str, architecture: str, definitions: tuple[str, ...] = ()) -> CompiledModule:
    """Compiles CUDA C++ that may include the headers of csrc; see `compile_module`."""
    library = _library()
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}", *_OPTIONS, *definitions]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), encoded)
        log = _read(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if failed:
            message = f"{name} for {architecture}:\n{log}"
            raise KernelBuildError(message)
        return CompiledModule(_read(library, program, "CUBIN"), parse_log(log))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def parse_log(log: str) -> tuple[KernelResources, ...]:
    """Returns what ptxas says of each kernel in a program log."""
    kernels: list[KernelResources] = []
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", log):
        function, memory, registers = _FUNCTION.search(part), _MEMORY.search(part), _REGISTERS.search(part)
        if function and memory and registers:
            shared = _SHARED.search(part)
            kernels.append(
                KernelResources(
                    name=function["name"],
                    registers=int(registers["registers"]),
                    spill_bytes=int(memory["stores"]) + int(memory["loads"]),
                    stack_bytes=int(memory["stack"]),
                    shared_bytes=int(shared["shared"]) if shared else 0,
                )
            )
    return tuple(kernels)


@cache
def nvrtc_version() -> str:
    """Returns the compiler's version, such as "13.0".

    Raises:
        KernelUnavailable: NVRTC is not installed.
    """
    library = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


@cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("cu13/lib/libnvrtc.so.*")):
            # NVRTC looks its built-ins up by name: they must be loaded before it asks.
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(str(path))
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
    message = "NVRTC is not installed (pip install 'nvidia-cuda-nvrtc==13.0.*')"
    raise KernelUnavailable(message)


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        raise KernelUnavailable(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Returns the program's log or binary: each has a function for its size and one that copies it."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw
