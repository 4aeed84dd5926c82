"""`stepahead bench scheduler` is the same command, started by the command line that may not import it."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from stepahead.cli import services
from stepahead.cli.main import main


@pytest.mark.parametrize("measurement", ["scheduler", "traces"])
def test_arguments_are_passed_through(monkeypatch: pytest.MonkeyPatch, measurement: str):
    executed: list[list[str]] = []
    monkeypatch.setattr(services.os, "execv", lambda path, argv: executed.append(argv))
    result = CliRunner().invoke(main, ["bench", measurement, "--rows", "8,64", "--json", "--help"])
    assert result.exit_code == 0, result.output
    arguments = ["stepahead.scheduler.bench", measurement, "--rows", "8,64", "--json", "--help"]
    assert executed == [[sys.executable, "-m", "stepahead.cli.module_entry", *arguments]]


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "stepahead.scheduler.bench", "scheduler", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "--vs-vllm" in done.stdout
