"""What the benchmarks send, how peers answer, and what is made of it."""

import asyncio
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from stepahead.cli.announcements import Ready
from stepahead.cli.bench_peers import Peer
from stepahead.cli.bench_plot import Bar, BarGroup, axis_top, bar_chart
from stepahead.cli.bench_report import plot, ratios_of
from stepahead.cli.bench_roof import MachineSpeed, ModelWork, decode_roof_s, work_of
from stepahead.cli.bench_serve import read_requests, traced_arrivals
from stepahead.cli.bench_session import RunFigures, figures_of
from stepahead.cli.bench_systems import TimedRun
from stepahead.cli.bench_workload import (
    SHAPES,
    Shape,
    WorkItem,
    Workload,
    closed_batch,
    parse_shape,
    poisson_arrivals,
    shortened,
)
from stepahead.cli.failures import StackError

PEER = Path(__file__).with_name("bench_peer.py")


def test_shapes_are_named_or_spelled_out():
    assert parse_shape("S2") is SHAPES["S2"]
    assert parse_shape("7/2") == Shape("7/2", 7, 2)
    for text in ("S3", "7/1", "0/9", "7", "7/x", "-1/4"):
        with pytest.raises(ValueError, match="PROMPT/OUTPUT"):
            parse_shape(text)


def test_a_closed_batch_is_the_same_for_everyone_and_new_every_round():
    first, again, other = (closed_batch(Shape("s", 20, 4), 3, 50_000, seed) for seed in ("0", "0", "1"))
    assert first == again
    assert first.is_closed
    assert len({item.prompt for item in (*first.items, *other.items)}) == 6
    assert all(1000 <= token < 40_000 for item in first.items for token in item.prompt)
    assert first.mean_context == 20 + 1.5
    assert shortened(first, 2).num_output_tokens == 6


def test_small_vocabularies_have_room_for_prompts_too():
    batch = closed_batch(Shape("s", 200, 2), 1, 16, "0")
    assert set(batch.items[0].prompt) <= set(range(4, 16))


def test_poisson_arrivals_have_their_rate():
    load = poisson_arrivals(Shape("s", 1, 2), 4000, 8.0, 256, "0")
    times = [item.at_s for item in load.items]
    assert times[0] == 0.0
    assert times == sorted(times)
    # The mean of n exponential gaps lies within 5 % of 1 / rate for n = 4000 in all but 0.2 % of seeds.
    assert times[-1] / 3999 == pytest.approx(1 / 8, rel=0.05)
    assert not load.is_closed


def test_the_roof_is_the_slower_of_reading_and_multiplying():
    work = ModelWork(weight_bytes=1000, kv_bytes_per_token=2, flops_per_token=1000.0)
    # 1000 bytes of weights and 4 rows x 10 positions x 2 bytes, at 100 bytes a second; 4 x 1000 operations at 1000.
    assert decode_roof_s(work, MachineSpeed(100.0, 1000.0), 4, 10.0) == pytest.approx(10.8)
    assert decode_roof_s(work, MachineSpeed(100.0, 100.0), 4, 10.0) == pytest.approx(40.0)


def test_a_model_without_weights_has_no_roof():
    assert work_of(Ready({"weight_bytes": 0, "dtype": "int64"})) is None
    work = work_of(
        Ready({"weight_bytes": 200, "stored_weight_bytes": 150, "dtype": "bfloat16", "kv_bytes_per_token": 3})
    )
    assert work == ModelWork(150, 3, 200.0)


WORKLOAD = Workload("w", (WorkItem(0.0, (1,) * 10, 3), WorkItem(0.0, (2,) * 10, 2)))


def test_figures_of_a_run():
    run = TimedRun(2.0, [[0.5, 0.75, 2.0], [0.25, 0.5]], 2**21)
    speed = MachineSpeed(1e9, 1e12)
    work = ModelWork(weight_bytes=10**8, kv_bytes_per_token=0, flops_per_token=1.0)
    figures = figures_of("x", WORKLOAD, run, speed, work)
    assert figures.tokens_per_s == 2.5
    assert (figures.ttft_ms_p50, figures.ttft_ms_p99) == (250.0, 500.0)
    assert (figures.itl_ms_p50, figures.itl_ms_p99) == (250.0, 1250.0)
    assert (figures.peak_mib, figures.read_gb_per_s, figures.gflop_per_s) == (2.0, 1.0, 1000.0)
    # 0.1 s of reading against 0.25 s between tokens.
    assert figures.roof_fraction == pytest.approx(0.4)
    assert figures_of("x", WORKLOAD, run, None, None).roof_fraction is None


def run_of(system: str, tokens_per_s: float, ttft_ms: float) -> RunFigures:
    return RunFigures(
        system=system, workload="w", tokens_per_s=tokens_per_s, ttft_ms_p50=ttft_ms, ttft_ms_p99=ttft_ms,
        itl_ms_p50=1.0, itl_ms_p99=1.0, peak_mib=None,
    )  # fmt: skip


RUNS = [run_of("stepahead", 30, 1), run_of("p & q", 10, 2), run_of("stepahead", 40, 3), run_of("p & q", 20, 2)]


def test_ratios_pair_a_run_with_its_neighbour():
    (ratio,) = ratios_of(RUNS)
    assert (ratio.workload, ratio.peer) == ("w", "p & q")
    assert (ratio.tokens_per_s.low, ratio.tokens_per_s.median, ratio.tokens_per_s.high) == (2.0, 2.5, 3.0)
    assert ratio.ttft_p99.median == 1.0


@pytest.mark.parametrize(
    ("largest", "top"), [(0, 1.0), (1, 1), (1.01, 2), (2.1, 2.5), (3, 5), (51, 100), (740, 1000), (0.03, 0.05)]
)
def test_an_axis_ends_at_a_round_number(largest, top):
    assert axis_top(largest) == pytest.approx(top)


def test_the_plot_is_svg_with_a_bar_per_cell():
    root = ET.fromstring(plot(RUNS))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in root.iter(f"{space}title")]
    assert titles == ["stepahead: 35.0 (30.0 to 40.0)", "p & q: 15.0 (10.0 to 20.0)"]
    bars = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[0] / heights[1] == pytest.approx(35 / 15, rel=1e-2)


def test_a_chart_of_nothing_is_a_chart():
    ET.fromstring(bar_chart("nothing", []))
    ET.fromstring(bar_chart("zero", [BarGroup("g", (Bar("a", 0.0, 0.0, 0.0),))]))


def ask_peer(behaviour: str, workload: Workload = WORKLOAD) -> TimedRun:
    async def ask() -> TimedRun:
        async with Peer(f"{sys.executable} '{PEER}' {behaviour}") as peer:
            assert (peer.name, peer.open_loop, peer.facts) == ("made-up", behaviour == "open", {"version": "1"})
            return await peer.run(workload)

    return asyncio.run(ask())


def test_a_peer_answers_a_workload():
    late = Workload("w", (*WORKLOAD.items, WorkItem(10.0, (3,), 2)))
    run = ask_peer("open", late)
    assert run.token_times_s == [[0.5, 0.75, 1.0], [0.5, 0.75], [0.5, 0.75]]
    assert run.duration_s == 10.75
    assert run.peak_bytes > 2**20


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("short", "made 3 tokens, not 5"), ("fails", "out of ideas"), ("dies", "exited with code 3")],
)
def test_a_peer_that_does_not_do_its_work_ends_the_benchmark(behaviour, message):
    with pytest.raises(StackError, match=message):
        ask_peer(behaviour)


def test_a_peer_that_does_not_start_is_named():
    async def start() -> None:
        async with Peer("/nowhere/python peer.py"):
            pass

    with pytest.raises(StackError, match="/nowhere/python"):
        asyncio.run(start())


def test_a_trace_becomes_requests_that_share_what_it_shares(tmp_path: Path):
    trace = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [7]},
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    traced = read_requests(trace, limit=10, speed=2.0, scale=0.25)
    load = traced_arrivals("small", traced, 50_000, 0, 0)
    first, second = load.items
    assert [(item.at_s, len(item.prompt), item.output_tokens) for item in load.items] == [(0, 150, 1), (1, 128, 1)]
    assert first.prompt[:128] == second.prompt
    assert traced_arrivals("small", traced, 50_000, 0, 1).items[0].prompt[:4] != first.prompt[:4]


def test_a_trace_without_blocks_shares_nothing(tmp_path: Path):
    trace = tmp_path / "small.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,8,3\n2023-11-16 18:15:48.6805900,8,5\n"
    )
    first, second = traced_arrivals("a", read_requests(trace, limit=2, speed=1, scale=1), 50_000, 0, 0).items
    assert (second.at_s, second.output_tokens) == (2.0, 5)
    assert not set(zip(first.prompt, second.prompt, strict=True)) & {(token, token) for token in first.prompt}


def test_a_file_that_is_no_trace_is_refused_by_name(stepahead, tmp_path: Path):
    trace = tmp_path / "broken.csv"
    trace.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,8\n")
    result = stepahead("bench", "serve", "--model", "toy:sleep", "--trace", str(trace))
    assert (result.exit_code, "broken.csv, line 2" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("throughput",),
        ("throughput", "--model", "m", "--server", "s"),
        ("throughput", "--model", "m", "--shape", "9"),
        ("serve", "--model", "m", "--rate", "1", "--trace", __file__),
    ],
)
def test_wrong_usage_starts_nothing(stepahead, arguments):
    assert stepahead("bench", *arguments).exit_code == 2


def test_the_peers_contract_is_kept_by_the_common_part():
    code = (
        "import sys; sys.path.insert(0, 'scripts/peers'); from peer import serve, take_stdout; c = take_stdout(); "
        "print('noise'); serve(c, 'p', lambda requests, clock: [[r.at_s + i for i in range(r.output_tokens)] "
        "for r in requests], open_loop=True, version='2')"
    )
    root = Path(__file__).parents[2]
    line = json.dumps({"requests": [{"at_s": 1.0, "prompt": [5], "output_tokens": 2}]}) + "\n"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=line, capture_output=True, text=True, cwd=root, check=True)
    assert [json.loads(each) for each in done.stdout.splitlines()] == [
        {"ready": "p", "open_loop": True, "version": "2"},
        {"token_times_s": [[1.0, 2.0]]},
    ]
    assert "noise" in done.stderr


@pytest.mark.parametrize("command", ["", "  ", "a 'b"])
def test_a_peer_that_names_no_command_is_a_usage_error(stepahead, command):
    result = stepahead("bench", "throughput", "--model", "toy:sleep", "--vs", "python peer.py", "--vs", command)
    assert (result.exit_code, "Invalid value for '--vs'" in result.stderr) == (2, True)
