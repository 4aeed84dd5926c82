"""Writes the exact versions that the images install, from what the development environment holds.

`scheduler_svc/requirements.lock` and `worker_svc/requirements.lock` are the closures of the extras of those names,
`deploy/build.lock` that of the build backend. With `--check` nothing is written: differences end in exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Written by scripts/lock_requirements.py. Installed with --no-deps: nothing else comes in.\n"


def closure(requirements: list[str]) -> dict[str, str]:
    """Exact versions of everything that the requirements need, by canonical name.

    Raises:
        PackageNotFoundError: the environment lacks one of them.
    """
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [Requirement(text) for text in requirements]
    while queue:
        wanted = queue.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found = distribution(name)
        # A local part (+cpu) says which build this machine uses, not which one an image needs.
        versions[name] = Version(found.version).public
        for text in found.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                queue.append(needed)
    return versions


def locks() -> dict[Path, dict[str, str]]:
    """The content of every lock file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    base, extras = project["project"]["dependencies"], project["project"]["optional-dependencies"]
    return {
        ROOT / "scheduler_svc/requirements.lock": closure(base + extras["scheduler"]),
        ROOT / "worker_svc/requirements.lock": closure(base + extras["worker"]),
        ROOT / "deploy/build.lock": closure(project["build-system"]["requires"]),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Only say whether the files are current.")
    check = parser.parse_args().check
    try:
        contents = locks()
    except PackageNotFoundError as error:
        sys.exit(f"not installed: {error}; run make setup and pip install hatchling")
    stale = False
    for path, versions in contents.items():
        text = HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
        if not check:
            path.write_text(text)
        elif path.read_text() != text:
            stale = True
            print(f"{path.relative_to(ROOT)} is not what is installed")
    sys.exit(int(stale))


if __name__ == "__main__":
    main()
