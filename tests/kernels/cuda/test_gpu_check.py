"""The GPU check, every line of it that a CPU can run: tiny sizes, the host in the GPU's place."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from tests.architecture.tree import ROOT


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_fills_every_table(gpu_check, tmp_path, capsys):
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert list(report["parts"]) == [part.name for part in gpu_check.PARTS]
    assert all(part["ended"] == "ok" and part["rows"] for part in report["parts"].values())
    assert len(report["parts"]["decode"]["rows"]) == 8
    assert [row["what"] for row in report["parts"]["ranks"]["rows"]] == ["tokens of one GPU", "decode"]
    assert all(row["error"] < 0.02 for row in report["parts"]["attention"]["rows"])
    text = (tmp_path / "gpu-check.md").read_text()
    assert text in capsys.readouterr().out
    assert "| rows | overlap | graphs |" in text


def test_the_parts_fit_into_eight_minutes(gpu_check):
    """On one GPU; what needs two has its own two."""
    limits = {gpus: sum(part.limit_s for part in gpu_check.PARTS if part.gpus == gpus) for gpus in (1, 2)}
    assert limits[1] + gpu_check.SANITIZER_S + gpu_check.STACK_S <= 480
    assert limits[2] <= 120


def test_two_gpus_are_not_asked_of_one(gpu_check, monkeypatch):
    import gpu_check_ranks
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rows = list(gpu_check_ranks.ranks(SimpleNamespace(small=False)))
    assert gpu_check._result(rows, "ok", 0.0)["ended"] == "skipped: one GPU"


def test_a_part_that_fails_stops_no_other(gpu_check, tmp_path, monkeypatch):
    """Here every part fails in its child, as there is no GPU; the report says so and is written all the same."""
    monkeypatch.setattr(gpu_check, "PARTS", gpu_check.PARTS[1:3])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_check.check(tmp_path, ["tokens", "waits", "sanitizer"], small=False) == 2
    parts = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]
    assert parts["tokens"]["ended"] == parts["waits"]["ended"] == "exit code 1"
    assert "KernelUnavailable" in parts["tokens"]["log"]
