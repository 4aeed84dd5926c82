"""The version of the installed package."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version() -> str:
    """As pyproject.toml states it; "unknown" in a tree that was never installed."""
    try:
        return version("stepahead")
    except PackageNotFoundError:
        return "unknown"
