"""The benchmarks' arithmetic: percentiles, spread, ratios, sums over steps, processes."""

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepahead.cli import bench_processes
from stepahead.cli.bench_frontend import Crowd
from stepahead.cli.bench_load import LoadShape
from stepahead.cli.bench_processes import ForeignCpu, cpu_s, machine_busy_s, process_tree, resident_bytes
from stepahead.cli.bench_server import step_figures
from stepahead.cli.bench_stats import median_of, percentile, ratios, spread_of
from stepahead.v1 import operations_pb2


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0.0),
        ([7.0], 0.99, 7.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 3.0, 2.0, 1.0], 0.5, 2.0),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 101)), 1.0, 100),
        (list(range(1, 101)), 0.0, 1),
    ],
)
def test_percentile_is_the_nearest_rank(values, share, expected):
    assert percentile(values, share) == expected


def test_spread_and_ratios_pair_neighbouring_runs():
    assert spread_of([3.0, 1.0, 8.0]).median == 3.0
    pairs = ratios([10.0, 30.0, 8.0], [5.0, 10.0, 8.0])
    assert (pairs.median, pairs.low, pairs.high, pairs.count) == (2.0, 1.0, 3.0, 3)
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])


def test_median_of_runs_is_field_by_field():
    @dataclass(frozen=True)
    class Figures:
        name: str
        speed: float
        count: int

    runs = [Figures("a", 3.0, 10), Figures("a", 1.0, 30), Figures("a", 2.0, 20)]
    assert median_of(runs) == Figures("a", 2.0, 20)


def record(**fields: int) -> operations_pb2.StepRecord:
    return operations_pb2.StepRecord(**fields)


def test_steps_without_waiting_work_count_nowhere():
    records = [
        record(work_waited=True, gap_ns=1_000, sample_wait_ns=2_000, busy_ns=97_000, boundary_to_plan_ns=5_000),
        record(work_waited=True, gap_ns=3_000, busy_ns=97_000),
        record(work_waited=False, gap_ns=10**9, busy_ns=10**6, boundary_to_plan_ns=10**9),
    ]
    figures = step_figures(records)
    assert figures.num_steps == 3
    assert figures.idle_fraction == pytest.approx(6_000 / 200_000)
    assert (figures.gap_us_p50, figures.gap_us_p99) == (1.0, 3.0)
    # A step that no plan followed has no latency.
    assert (figures.boundary_to_plan_us_p50, figures.boundary_to_plan_us_p99) == (5.0, 5.0)
    assert figures.step_ms_p50 == pytest.approx(0.1)


def test_no_steps_are_no_division_by_zero():
    assert step_figures([]).idle_fraction == 0.0


def test_a_crowd_spreads_those_who_leave_over_the_answer():
    shape = LoadShape(num_requests=10, prompt_tokens=4, output_tokens=100, multiplexed=False, vocab_size=256)
    planned = Crowd(name="c", shape=shape, num_slow=3, pause_s=0.5, num_leaving=4).requests()
    assert [each.pause_s for each in planned] == [0.5] * 3 + [0.0] * 7
    assert [each.leave_after for each in planned] == [None] * 3 + [1, 26, 51, 76] + [None] * 3


def test_a_tree_of_processes_has_its_children_and_ends_with_them():
    code = (
        "import subprocess, sys; p = subprocess.Popen(['cat'], stdin=subprocess.PIPE); print(p.pid, flush=True); "
    )
    code += "print(p.pid, flush=True); sys.stdin.read(); p.communicate()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as parent:
        child = int(parent.stdout.readline())
        assert sorted(process_tree(parent.pid)) == sorted([parent.pid, child])
        assert resident_bytes(parent.pid) > resident_bytes(child) > 0
        parent.communicate("")
    assert process_tree(parent.pid) == []
    assert resident_bytes(parent.pid) == 0


def test_what_others_use_is_a_share_and_not_ours():
    foreign = ForeignCpu(())
    before = machine_busy_s()
    started = os.times()
    while os.times().user + os.times().system < started.user + started.system + 0.2:
        sum(range(10_000))
    assert machine_busy_s() >= before + 0.15
    assert 0 <= foreign.share() < 1


@pytest.mark.parametrize(
    ("cores", "waits"),
    [([0.0], 1), ([1.0, 0.7, 0.05, 1.0], 3), ([0.5] * 99, 34)],
    ids=["at rest", "works on for a while", "never rests"],
)
def test_a_run_waits_until_the_others_rest(monkeypatch, cores, waits):
    """Each look takes 0.3 s; after ten seconds the run begins anyhow."""
    now_s, used_s, slept = 0.0, {7: 0.0, 8: 0.0}, []

    async def sleep(seconds):
        nonlocal now_s
        now_s += seconds
        used_s[7] += cores[len(slept)] * seconds
        slept.append(seconds)

    monkeypatch.setattr(bench_processes, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(bench_processes, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(bench_processes, "cpu_s", used_s.__getitem__)
    asyncio.run(bench_processes.until_idle([8, 7]))
    assert len(slept) == waits


def test_cpu_time_grows_with_work():
    before = cpu_s(os.getpid())
    while os.times().user + os.times().system < before + 0.05:
        sum(range(10_000))
    assert cpu_s(os.getpid()) > before


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's own on Linux")
def test_a_client_yields_its_cores_with_every_thread():
    code = """
import os, threading
from stepahead.cli.bench_processes import yield_cores
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
before = os.getpriority(os.PRIO_PROCESS, 0)
yield_cores()
for each in (threading.get_native_id(), thread.native_id):
    is_nicer = os.getpriority(os.PRIO_PROCESS, each) > before or before > 9
    print(is_nicer, os.sched_getscheduler(each) == os.SCHED_BATCH)
end.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n" * 2


def test_a_clients_session_yields_while_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among sessions, a thread's niceness does not count. Where sessions do not count, nothing happens."""
    session = tmp_path / "autogroup"
    monkeypatch.setattr(bench_processes, "_SESSION", session)
    session.write_text("/autogroup-25 nice 3\n")
    with bench_processes.yielding_session():
        assert session.read_text() == "19"
    assert session.read_text() == "3"
    session.unlink()
    with bench_processes.yielding_session():
        pass
    assert not session.exists()


def test_a_session_weighs_what_it_did_however_soon_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux refuses a change that follows another within 0.1 s, unless root asks."""
    weights, refusals = [3], ["begin", "end", "end"]

    def weigh(text: str) -> None:
        phase = "begin" if len(weights) == 1 else "end"
        if phase in refusals:
            refusals.remove(phase)
            raise BlockingIOError
        weights.append(int(text))

    session = SimpleNamespace(read_text=lambda: f"/autogroup-25 nice {weights[-1]}\n", write_text=weigh)
    monkeypatch.setattr(bench_processes, "_SESSION", session)
    with bench_processes.yielding_session():
        assert weights == [3, 19]
    assert weights == [3, 19, 3]
