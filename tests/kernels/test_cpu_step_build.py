"""Compiling the step library: the cache, its key, several builders at once, and what is said when it fails."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stepahead.kernels.cpu.step import build
from stepahead.kernels.cpu.step.build import (
    CACHE_ENV,
    COMPILER_ENV,
    LIBRARY_ENV,
    BuildUnavailable,
    built_library,
    emulated_library,
)

# Tells its version, notes every other call, and makes the file after -o.
# It knows AMX unless it is told otherwise.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi
case "$@" in *-mamx-tile*) [ -n "$NO_AMX" ] && exit 1;; esac
echo "$@" >> "{log}"
while [ "$1" != -o ]; do shift; done
sleep 0.1
echo built > "$2"
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compiler that takes no time, and an empty cache."""
    compiler, log = tmp_path / "fake-g++", tmp_path / "calls"
    compiler.write_text(FAKE_COMPILER.format(log=log), encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv(COMPILER_ENV, str(compiler))
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.delenv(LIBRARY_ENV, raising=False)
    return compiler


def calls(fake):
    return (fake.parent / "calls").read_text(encoding="utf-8").splitlines()


def test_sources_are_compiled_once_each_with_their_own_flags(fake):
    path = built_library()
    assert path.parent == fake.parent / "cache"
    assert path.read_text(encoding="utf-8") == "built\n"
    compiled = {
        Path(source).name: call for call in calls(fake) for source in call.split() if source.endswith(".cpp")
    }
    assert set(compiled) == {source.name for source in build.SOURCE_DIRECTORY.glob("*.cpp")}
    # Only the code of an instruction set may use it: the rest runs before anybody asked what this CPU has.
    with_avx512 = {"isa_avx512.cpp", "isa_amx.cpp"}
    assert {name for name, call in compiled.items() if "-mavx2" in call} == {"isa_avx2.cpp", *with_avx512}
    assert {name for name, call in compiled.items() if "-mavx512f" in call} == with_avx512
    assert {name for name, call in compiled.items() if "-mamx-tile -mamx-bf16" in call} == {"isa_amx.cpp"}
    assert not any("STEP_EMULATE_TILES" in call for call in calls(fake))
    assert all("-ffp-contract=off" in call for call in compiled.values())
    before = len(calls(fake))
    assert built_library() == path
    assert len(calls(fake)) == before
    assert {entry.name for entry in path.parent.iterdir()} == {"lock", path.name}


def test_a_compiler_that_knows_no_amx_builds_the_rest_and_the_command_says_so(fake, monkeypatch):
    command = [sys.executable, "-m", "stepahead.kernels.cpu.step.build"]
    monkeypatch.setenv("NO_AMX", "1")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "the compiler knows no AMX instructions: the library is built without the AMX path\n"
    assert Path(done.stdout.strip()).exists()
    assert any("isa_amx.cpp" in call for call in calls(fake))
    assert not any("-mamx" in call for call in calls(fake))
    monkeypatch.delenv("NO_AMX")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""


def test_the_emulation_is_a_library_of_its_own(fake):
    path = emulated_library()
    assert path.name.startswith("step-emulated-")
    compiled = [call for call in calls(fake) if ".cpp" in call]
    assert all("-DSTEP_EMULATE_TILES" in call for call in compiled)
    assert not any("-mamx" in call or "isa_avx" in call for call in compiled)
    assert built_library() != path


def test_the_name_depends_on_compiler_flags_and_sources(fake, monkeypatch, tmp_path):
    names = {built_library().name}
    text = fake.read_text(encoding="utf-8")
    fake.write_text(text.replace("fake 1.0", "fake 1.1"), encoding="utf-8")
    names.add(built_library().name)
    monkeypatch.setattr(build, "_COMMON_FLAGS", (*build._COMMON_FLAGS, "-g"))
    names.add(built_library().name)
    sources = tmp_path / "sources"
    sources.mkdir()
    for source in build.SOURCE_DIRECTORY.iterdir():
        (sources / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCE_DIRECTORY", sources)
    assert built_library().name in names
    (sources / "tile.h").write_text("// changed", encoding="utf-8")
    names.add(built_library().name)
    assert len(names) == 4


def test_builders_at_once_build_once(fake):
    command = [sys.executable, "-m", "stepahead.kernels.cpu.step.build"]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {builder.communicate()[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert len(printed) == 1
    probes, links = 4, 1  # each asks whether the compiler knows AMX to say so, and the one that builds to build
    assert len(calls(fake)) == len(list(build.SOURCE_DIRECTORY.glob("*.cpp"))) + probes + links


def test_no_compiler(fake, monkeypatch):
    monkeypatch.setenv(COMPILER_ENV, "no-such-compiler")
    with pytest.raises(BuildUnavailable, match="no compiler 'no-such-compiler'"):
        built_library()
    done = subprocess.run(
        [sys.executable, "-m", "stepahead.kernels.cpu.step.build"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "cannot be built: there is no compiler" in done.stderr


def test_a_compiler_that_fails_says_why_and_leaves_nothing(fake):
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'tile.h: too hard' >&2\nexit 1\n")
    with pytest.raises(BuildUnavailable, match=r"tile\.h: too hard"):
        built_library()
    assert [entry.name for entry in (fake.parent / "cache").iterdir()] == ["lock"]


def test_what_a_killed_build_left_is_removed(fake):
    left = fake.parent / "cache" / "build-killed"
    left.mkdir(parents=True)
    (left / "api.o").write_text("half", encoding="utf-8")
    path = built_library()
    assert sorted(each.name for each in path.parent.iterdir()) == ["lock", path.name]


def test_what_killed_compilers_leave_lies_beside_it(fake, monkeypatch):
    elsewhere = fake.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    leave = """case "$called" in *csrc*) touch "$TMPDIR/half.s";; esac"""
    script = fake.read_text(encoding="utf-8").replace("while [", 'called="$*"\nwhile [')
    fake.write_text(script.replace("sleep 0.1", leave), encoding="utf-8")
    path = built_library()
    assert sorted(each.name for each in path.parent.iterdir()) == ["lock", path.name]
    assert not list(elsewhere.iterdir())


def test_a_cache_that_cannot_be_written(fake, monkeypatch):
    (fake.parent / "file").touch(mode=stat.S_IRUSR)
    monkeypatch.setenv(CACHE_ENV, str(fake.parent / "file" / "cache"))
    with pytest.raises(BuildUnavailable, match="cannot be written"):
        built_library()


def test_other_systems_are_told(monkeypatch):
    monkeypatch.delenv(LIBRARY_ENV, raising=False)
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    with pytest.raises(BuildUnavailable, match="x86-64 Linux, this is linux on aarch64"):
        built_library()


def test_the_default_cache_is_the_users(monkeypatch):
    monkeypatch.delenv(CACHE_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_directory() == Path("/somewhere/stepahead/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_directory() == Path(os.path.expanduser("~/.cache/stepahead/kernels"))
