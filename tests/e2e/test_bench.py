"""`stepahead bench` on the real services, with toy models: each verb once, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepahead.cli.bench_workload import Shape, poisson_arrivals
from stepahead.cli.main import main

pytestmark = pytest.mark.e2e

PEER = Path(__file__).parents[1] / "cli" / "bench_peer.py"
COMMAND = (sys.executable, "-c", "from stepahead.cli.main import main; main()", "bench")


def bench(*arguments: str) -> dict:
    # A process of its own: a benchmark makes itself nice to the servers that it measures, for good.
    done = subprocess.run([*COMMAND, *arguments, "--json"], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_frontend_compares_readers_that_read_with_some_that_do_not():
    shape = ("-n", "12", "--running", "8", "--output", "20")
    arguments = ("--model", "toy:sleep?ms=1", *shape, "--rounds", "2", "--overlap", "2")
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


def test_throughput_runs_ours_and_a_peer_in_turn(tmp_path):
    peer = f"{sys.executable} '{PEER}' closed"
    svg = tmp_path / "out.svg"
    arguments = ("--model", "toy:sleep?ms=1", "--shape", "8/6", "-n", "1", "-n", "3", "--rounds", "2")
    figures = bench("throughput", *arguments, "--vs", peer, "--plot", str(svg))
    assert [(run["workload"], run["system"]) for run in figures["runs"]] == [
        (f"8/6 x{count}", system) for count in (1, 3) for _ in range(2) for system in ("stepahead", "made-up")
    ]
    ours = figures["runs"][0]
    assert ours["peak_mib"] > 0
    assert ours["running_share"] > 0
    assert ours["roof_fraction"] is None  # a toy has no weights
    assert [ratio["peer"] for ratio in figures["ratios"]] == ["made-up", "made-up"]
    assert figures["peers"] == {"made-up": {"version": "1"}}
    assert svg.read_text().startswith("<svg")


def test_serve_sends_requests_when_they_are_due():
    arguments = ("--model", "toy:sleep?ms=1", "--shape", "8/4", "-n", "6", "--rate", "40", "--client", "generate")
    runs = bench("serve", *arguments, "--rounds", "2")["runs"]
    assert [run["workload"] for run in runs] == ["8/4 40/s"] * 2
    for number, run in enumerate(runs):
        last_s = poisson_arrivals(Shape("8/4", 8, 4), 6, 40.0, 256, f"0-{number}").items[-1].at_s
        assert 0 < run["tokens_per_s"] < 24 / last_s
        assert 0 < run["ttft_ms_p50"] <= run["ttft_ms_p99"]


def test_serve_refuses_a_peer_that_takes_closed_batches_only():
    command = [
        *COMMAND,
        "serve",
        "--model",
        "toy:sleep?ms=1",
        "-n",
        "2",
        "--vs",
        f"{sys.executable} '{PEER}' closed",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, "made-up takes no requests while others run" in done.stderr) == (1, True)
