"""`stepahead bench` on the real services, with toy models: each verb once, small."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from stepahead.cli.main import main

pytestmark = pytest.mark.e2e

COMMAND = (sys.executable, "-c", "from stepahead.cli.main import main; main()", "bench")


def bench(*arguments: str) -> dict:
    # A process of its own: a benchmark makes itself nice to the servers that it measures, for good.
    done = subprocess.run([*COMMAND, *arguments, "--json"], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_frontend_compares_readers_that_read_with_some_that_do_not():
    arguments = ("--model", "toy:sleep?ms=1", "-n", "12", "--running", "8", "--output", "20", "--rounds", "2")
    runs = bench("frontend", *arguments, "--slow-readers", "2", "--disconnects", "3", "--pause", "0.05")["runs"]
    assert [run["load"] for run in runs] == ["all read"] * 2 + ["2 slow, 3 leave"] * 2
    for run in runs:
        assert (run["num_requests"], run["num_running"]) == (12, 8)
        assert run["tokens_per_s"] > 0
        assert 0 < run["boundary_to_plan_us_p50"] <= run["boundary_to_plan_us_p99"]
        assert run["memory_peak_mib"] >= run["memory_after_mib"] > 0


def test_frontend_refuses_misbehaviour_on_a_shared_stream():
    result = CliRunner().invoke(main, ["bench", "frontend", "--client", "multiplex", "--slow-readers", "1"])
    assert (result.exit_code, "a stream per request" in result.output) == (2, True)
    result = CliRunner().invoke(main, ["bench", "frontend", "-n", "3", "--slow-readers", "2", "--disconnects", "2"])
    assert (result.exit_code, "more than --requests" in result.output) == (2, True)
