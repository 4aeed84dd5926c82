"""Rules that every source file keeps; each function returns what breaks them, one line per offence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
# Names that say nothing about what is inside.
BANNED_NAMES = frozenset({"common", "helper", "helpers", "manager", "misc", "util", "utils"})
# Reading such data can run code that somebody else wrote.
BANNED_MODULES = frozenset({"cloudpickle", "dill", "marshal", "pickle", "shelve"})
BANNED_CALLS = frozenset({"torch.load", "torch.save", "eval", "exec"})
_NOTE = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\(#\d+\))")


def size_offences(path: Path, text: str) -> Iterator[str]:
    """Files that are too long."""
    limit = MAX_TEST_FILE_LINES if path.parts[0] == "tests" else MAX_FILE_LINES
    num_lines = len(text.splitlines())
    if num_lines > limit:
        yield f"{path}: {num_lines} lines, at most {limit}"


def name_offences(path: Path) -> Iterator[str]:
    """Files and folders with an empty name."""
    for part in (*path.parts[:-1], path.stem):
        if part in BANNED_NAMES:
            yield f"{path}: {part!r} does not say what is inside"


def note_offences(path: Path, text: str) -> Iterator[str]:
    """Notes to self without an issue number."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _NOTE.search(line):
            yield f"{path}:{number}: {match[0]} without an issue number, as in {match[0]}(#12)"


def code_offences(path: Path, tree: ast.Module) -> Iterator[str]:
    """Missing docstrings, long functions, and reading of data that can run code."""
    if not ast.get_docstring(tree):
        yield f"{path}:1: no module docstring"
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
            case ast.Import(names=names):
                for alias in names:
                    yield from _module_offences(path, node.lineno, alias.name)
            case ast.ImportFrom(module=str(module), names=names):
                yield from _module_offences(path, node.lineno, module)
                for alias in names:
                    yield from _call_offences(path, node.lineno, f"{module}.{alias.name}")
            case ast.Call(func=function, keywords=keywords):
                yield from _call_offences(path, node.lineno, ast.unparse(function))
                yield from _keyword_offences(path, node.lineno, keywords)
            case _:
                pass


def _module_offences(path: Path, line: int, module: str) -> Iterator[str]:
    if module.split(".", maxsplit=1)[0] in BANNED_MODULES:
        yield f"{path}:{line}: {module} can run code that comes with the data"


def _call_offences(path: Path, line: int, name: str) -> Iterator[str]:
    if name in BANNED_CALLS:
        yield f"{path}:{line}: {name} can run code that comes with the data"


def _keyword_offences(path: Path, line: int, keywords: list[ast.keyword]) -> Iterator[str]:
    for keyword in keywords:
        allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg == "allow_pickle" and not allowed:
            yield f"{path}:{line}: allow_pickle can run code that comes with the data"
