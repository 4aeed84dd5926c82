"""The tree is tidy, and the checks that say so would notice if it were not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture import tidy
from tests.architecture.tree import ROOT, own_paths

SOURCE_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h", ".js", ".mjs", ".ts", ".sh")
TEXT_SUFFIXES = (*SOURCE_SUFFIXES, ".proto", ".md", ".toml", ".yaml", ".yml")


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_files_are_short():
    offences = [line for path in own_paths(*SOURCE_SUFFIXES) for line in tidy.size_offences(path, read(path))]
    assert offences == []


def test_names_say_what_is_inside():
    offences = [line for path in own_paths(*SOURCE_SUFFIXES) for line in tidy.name_offences(path)]
    assert offences == []


def test_notes_to_self_name_an_issue():
    offences = [line for path in own_paths(*TEXT_SUFFIXES) for line in tidy.note_offences(path, read(path))]
    assert offences == []


def test_code_has_docstrings_short_functions_and_no_unsafe_loading():
    paths = own_paths(".py")
    offences = [line for path in paths for line in tidy.code_offences(path, ast.parse(read(path)))]
    assert offences == []
    assert Path("scripts/gen_protos.py") in paths


@pytest.mark.parametrize(("folder", "limit"), [("client", 400), ("tests", 600)])
def test_a_file_one_line_too_long_is_found(folder: str, limit: int):
    path = Path(folder, "x.py")
    assert list(tidy.size_offences(path, "\n" * limit)) == []
    assert list(tidy.size_offences(path, "\n" * (limit + 1))) == [f"{path}: {limit + 1} lines, at most {limit}"]


def test_a_banned_name_is_found_in_files_and_folders():
    assert len(list(tidy.name_offences(Path("client/utils.py")))) == 1
    assert len(list(tidy.name_offences(Path("client/common/x.py")))) == 1
    assert list(tidy.name_offences(Path("client/utilisation.py"))) == []


def test_a_note_is_found_unless_it_names_an_issue():
    note = "TO" + "DO"
    assert len(list(tidy.note_offences(Path("x.py"), f"# {note}: later"))) == 1
    assert list(tidy.note_offences(Path("x.py"), f"# {note}(#12): later")) == []


@pytest.mark.parametrize(
    ("code", "num_offences"),
    [
        ('"""Doc."""', 0),
        ("x = 1", 1),
        ('"""Doc."""\nimport pickle', 1),
        ('"""Doc."""\nfrom marshal import loads', 1),
        ('"""Doc."""\nimport os, shelve', 1),
        ('"""Doc."""\ntorch.load(path)', 1),
        ('"""Doc."""\nfrom torch import load', 1),
        ('"""Doc."""\neval("1")', 1),
        ('"""Doc."""\nmodel.eval()', 0),
        ('"""Doc."""\nnp.load(path, allow_pickle=True)', 1),
        ('"""Doc."""\nnp.load(path, allow_pickle=False)', 0),
        ('"""Doc."""\ndef f():\n' + "    x = 1\n" * 59, 0),
        ('"""Doc."""\nasync def f():\n' + "    x = 1\n" * 60, 1),
    ],
)
def test_unsafe_or_long_code_is_found(code: str, num_offences: int):
    assert len(list(tidy.code_offences(Path("x.py"), ast.parse(code)))) == num_offences
