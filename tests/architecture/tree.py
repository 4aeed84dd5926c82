"""The files of the repository, as git sees them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATED_MARKS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def committed_paths() -> list[Path]:
    """Files that are tracked, or would be with `git add`, relative to the root. Needs git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = {Path(name) for name in listing.split("\0") if name}
    return sorted(path for path in paths if (ROOT / path).is_file())


def own_paths(*suffixes: str) -> list[Path]:
    """Committed files with one of `suffixes`, generated stubs left out."""
    return [
        path for path in committed_paths() if path.suffix in suffixes and not path.name.endswith(GENERATED_MARKS)
    ]
