"""Reads the tree of folders that a README draws."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r"^(?P<lead>[\s│├└─]*)(?P<name>[\w.*-][\w.*/-]*)")
# Fewer lines that look like folders are an example, not a tree.
_MIN_FOLDERS = 3


def tree_blocks(markdown: str) -> list[str]:
    """Fenced blocks that draw a tree: with branches, or mostly of lines such as `kernels/   what it is`."""
    blocks: list[str] = []
    for block in _FENCED.findall(markdown):
        num_folders = len(re.findall(r"^\s*[\w.-][\w./-]*/(?:\s|$)", block, re.MULTILINE))
        if "├──" in block or "└──" in block or num_folders >= _MIN_FOLDERS:
            blocks.append(block)
    return blocks


def tree_paths(block: str) -> list[PurePosixPath]:
    """Paths that a tree names, in order. A first line such as `stepahead/` above everything is the root itself."""
    entries: list[tuple[int, str]] = []
    for line in block.splitlines():
        match = _ENTRY.match(line)
        if match is not None:
            entries.append((len(match["lead"]), match["name"]))
    root_drawn = len(entries) > 1 and all(depth > entries[0][0] for depth, _ in entries[1:])
    stack: list[tuple[int, PurePosixPath]] = []
    paths: list[PurePosixPath] = []
    for depth, name in entries[root_drawn:]:
        while stack and stack[-1][0] >= depth:
            stack.pop()
        parent = stack[-1][1] if stack else PurePosixPath()
        # A continued description does not begin with a path: only folders have children.
        path = parent / name
        paths.append(path)
        if name.endswith("/"):
            stack.append((depth, path))
    return paths
