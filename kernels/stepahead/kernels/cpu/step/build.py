"""Compiles the CPU step library into a cache: `python -m stepahead.kernels.cpu.step.build` does it ahead of time.

The cache is the user's (XDG_CACHE_HOME or ~/.cache, below `stepahead`), or the directory that
STEPAHEAD_KERNEL_CACHE names. A library's name holds a digest of sources, flags and compiler version: a changed
source is another file, and an old one is never loaded by mistake. An image without a compiler names the library
that was built with it in STEPAHEAD_STEP_LIBRARY.

A compiler that knows no AMX (GCC before 11) builds the library without that path, and the command says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CACHE_ENV = "STEPAHEAD_KERNEL_CACHE"
LIBRARY_ENV = "STEPAHEAD_STEP_LIBRARY"
COMPILER_ENV = "CXX"
SOURCE_DIRECTORY = Path(__file__).parent / "csrc"

# Contraction would let the compiler fuse a multiply and an add in one copy of inlined code and not in another:
# results would depend on how many rows a call has.
_COMMON_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"),
)
_AVX2 = ("-mavx2", "-mfma", "-mprfchw")  # CPUs without prefetchw take it for a no-op
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")
_FLAGS_OF: dict[str, tuple[str, ...]] = {"isa_avx2.cpp": _AVX2, "isa_avx512.cpp": _AVX512, "isa_amx.cpp": _AVX512}
_TILE_FLAGS = ("-mamx-tile", "-mamx-bf16")
_TILE_SOURCE = "isa_amx.cpp"
_TILE_PROBE = "#include <immintrin.h>\nvoid probe() { _tile_dpbf16ps(0, 1, 2); }\n"
_EMULATION_FLAG = "-DSTEP_EMULATE_TILES"
_NOT_EMULATED = ("isa_avx2.cpp", "isa_avx512.cpp")
_BUILD_PREFIX = "build-"


class BuildUnavailable(Exception):
    """The library cannot be built here; the message says why."""


def built_library() -> Path:
    """Returns the path of the compiled library, compiling it if the cache does not hold it.

    Several processes may call this at once: one compiles, the others wait.

    Raises:
        BuildUnavailable: other machine than x86-64 Linux, no compiler, a compiler that fails, no writable cache, or
            STEPAHEAD_STEP_LIBRARY names no file.
    """
    if named := os.environ.get(LIBRARY_ENV):
        if not Path(named).is_file():
            raise BuildUnavailable(f"{LIBRARY_ENV} names {named}, which is no file")
        return Path(named)
    return _built("step")


def emulated_library() -> Path:
    """Returns the same with the AMX path alone, its instructions in software: tests run it where no CPU has them.

    Raises:
        BuildUnavailable: as `built_library`.
    """
    return _built("step-emulated")


def knows_tiles() -> bool:
    """Whether the compiler knows AMX, so that the library it builds has that path.

    Raises:
        BuildUnavailable: there is no compiler.
    """
    command = [_compiler()[0], *_TILE_FLAGS, "-x", "c++", "-c", "-", "-o"]
    with tempfile.TemporaryDirectory() as directory:
        try:
            _run([*command, str(Path(directory) / "probe.o")], _TILE_PROBE)
        except BuildUnavailable:
            return False
    return True


def _built(name: str) -> Path:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise BuildUnavailable(f"it is written for x86-64 Linux, this is {sys.platform} on {platform.machine()}")
    compiler, version = _compiler()
    path = cache_directory() / f"{name}-{_digest(version)}.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():  # another process may have built it while this one waited
                _remove_abandoned(path.parent)
                _compile(compiler, path, emulate_tiles=name != "step")
    except OSError as error:
        raise BuildUnavailable(f"the cache {path.parent} cannot be written: {error}") from error
    return path


def cache_directory() -> Path:
    """Returns the directory of compiled libraries; it need not exist."""
    if named := os.environ.get(CACHE_ENV):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepahead" / "kernels"


def _compiler() -> tuple[str, str]:
    """Returns the compiler's path and what it says of its version."""
    name = os.environ.get(COMPILER_ENV) or "g++"
    path = shutil.which(name)
    if path is None:
        raise BuildUnavailable(f"there is no compiler {name!r} (install g++, or name one in {COMPILER_ENV})")
    return path, _run([path, "--version"])


def _digest(compiler_version: str) -> str:
    """Returns a digest of everything the compiled code depends on."""
    digest = hashlib.sha256(compiler_version.encode())
    digest.update(repr((_COMMON_FLAGS, sorted(_FLAGS_OF.items()), _TILE_FLAGS)).encode())
    for source in sorted(SOURCE_DIRECTORY.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _remove_abandoned(cache: Path) -> None:
    """Removes what builds left that were killed. The caller holds the lock: no other build runs."""
    for directory in cache.glob(f"{_BUILD_PREFIX}*"):
        shutil.rmtree(directory, ignore_errors=True)  # a compiler of theirs may still write there


def _compile(compiler: str, path: Path, *, emulate_tiles: bool) -> None:
    sources = sorted(SOURCE_DIRECTORY.glob("*.cpp"))
    common, flags_of = list(_COMMON_FLAGS), dict(_FLAGS_OF)
    if emulate_tiles:
        sources = [source for source in sources if source.name not in _NOT_EMULATED]
        common.append(_EMULATION_FLAG)
    elif knows_tiles():
        flags_of[_TILE_SOURCE] += _TILE_FLAGS
    with tempfile.TemporaryDirectory(prefix=_BUILD_PREFIX, dir=path.parent) as directory:
        objects = [Path(directory) / f"{source.stem}.o" for source in sources]

        def compile_one(index: int) -> None:
            source = sources[index]
            flags = [*common, *flags_of.get(source.name, ())]
            _run([compiler, *flags, "-c", str(source), "-o", str(objects[index])], directory=directory)

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
            list(threads.map(compile_one, range(len(sources))))
        linked = Path(directory) / "linked.so"
        _run([compiler, *common, "-shared", *map(str, objects), "-o", str(linked)], directory=directory)
        linked.replace(path)  # on one file system: a reader sees all of it or nothing


def _run(command: list[str], source: str | None = None, directory: str | None = None) -> str:
    """Returns what a compiler prints that is given `source` on standard input.

    Args:
        command: the compiler and its arguments.
        source: None: it reads files.
        directory: where its own temporary files lie, which a killed one leaves; None: where the system has them.

    Raises:
        BuildUnavailable: it fails.
    """
    environment = None if directory is None else {**os.environ, "TMPDIR": directory}
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise BuildUnavailable(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        last_lines = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise BuildUnavailable(f"{Path(command[0]).name} failed ({Path(command[-1]).name}): {last_lines}")
    return done.stdout


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{built_library()}\n")
        if LIBRARY_ENV not in os.environ and not knows_tiles():
            sys.stderr.write("the compiler knows no AMX instructions: the library is built without the AMX path\n")
    except BuildUnavailable as error:
        sys.exit(f"the CPU step library cannot be built: {error}")
