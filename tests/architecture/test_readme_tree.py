"""The tree of folders in the README is the tree on disk."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from tests.architecture.readme_tree import tree_blocks, tree_paths
from tests.architecture.tree import ROOT, committed_paths

BRANCHES = """
stepahead/
├── client/           the SDK
│   └── stepahead/
│       └── cli/      the command
├── Makefile
└── docs/
"""
INDENTED = """
client/stepahead/client/   the SDK
  errors.py                typed errors
kernels/
tests/                     mirrors the source
"""


def test_the_readme_draws_what_exists():
    blocks = tree_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    missing = [str(path) for block in blocks for path in tree_paths(block) if not list(ROOT.glob(str(path)))]
    assert missing == []


def test_the_readme_leaves_no_component_out():
    blocks = tree_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    folders = {path.parts[0] for path in committed_paths() if len(path.parts) > 1 and path.parts[0][0] != "."}
    for block in blocks:
        drawn = {path.parts[0] for path in tree_paths(block)}
        assert folders - drawn == set()
    assert {"client", "kernels", "protos", "scheduler_svc", "tests", "worker_svc"} <= folders


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (BRANCHES, ["client", "client/stepahead", "client/stepahead/cli", "Makefile", "docs"]),
        (INDENTED, ["client/stepahead/client", "client/stepahead/client/errors.py", "kernels", "tests"]),
    ],
    ids=["branches", "indented"],
)
def test_both_ways_of_drawing_are_read(block: str, expected: list[str]):
    markdown = f"# Title\n\n```\n{block.lstrip()}```\n\n```bash\nmake test\n```\n"
    (found,) = tree_blocks(markdown)
    assert tree_paths(found) == [PurePosixPath(path) for path in expected]
