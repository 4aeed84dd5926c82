"""Components import what they may, and load nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT

# Imports every module of a package and prints which of the unwanted modules that has loaded.
_WALK = """
import importlib, pkgutil, sys
package, unwanted, blocked = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
sys.modules.update({name: None for name in blocked if name})
root = importlib.import_module(package)
names = [package, *(m.name for m in pkgutil.walk_packages(root.__path__, package + "."))]
for name in names:
    importlib.import_module(name)
print(len(names), *(name for name in unwanted if sys.modules.get(name) is not None))
"""


def walk(package: str, *, unwanted: str, blocked: str = "") -> tuple[int, list[str]]:
    """(number of modules imported, unwanted ones that got loaded), in a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", _WALK, package, unwanted, blocked]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    num_modules, *loaded = result.stdout.split()
    return int(num_modules), loaded


@pytest.mark.parametrize("package", ["stepahead.scheduler", "stepahead.client", "stepahead.cli"])
def test_services_without_a_device_load_no_device_library(package: str):
    num_modules, loaded = walk(package, unwanted="torch,cupy,transformers,stepahead.kernels,stepahead.worker")
    assert loaded == []
    assert num_modules >= 1


def test_the_walk_notices_what_is_loaded():
    _, loaded = walk("stepahead.scheduler.text", unwanted="tokenizers,torch")
    assert loaded == ["tokenizers"]


def test_kernels_import_on_a_machine_without_cupy():
    num_modules, loaded = walk("stepahead.kernels", unwanted="cupy,grpc,google.protobuf", blocked="cupy")
    assert loaded == []
    assert num_modules >= 1


def test_import_contracts_hold():
    lint_imports = Path(sys.executable).parent / "lint-imports"
    environment = {**os.environ, "NO_COLOR": "1"}
    result = subprocess.run(
        [lint_imports, "--no-cache", "--no-logo"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout
