"""Reading traces, making prompts for them, replaying them."""

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepahead.scheduler.bench.__main__ import main
from stepahead.scheduler.bench.fairness import ServiceMeter, TenantPicker, jain_index
from stepahead.scheduler.bench.replay import Replay, ReplayFailure
from stepahead.scheduler.bench.simulated_lane import DeviceSpeed
from stepahead.scheduler.bench.trace_files import Trace, TraceError, TraceRequest, read_trace
from stepahead.scheduler.bench.trace_prompts import PromptMaker, reuse_of, scaled
from stepahead.scheduler.bench.trace_report import figures_of
from stepahead.scheduler.core import Finished, FinishReason, Ordering, RequestKey, Scheduler, SchedulerConfig
from tests.scheduler.bench.traces import conversations, options, write_azure, write_mooncake


def trace_of(*requests: tuple[int, int, int], hashes: tuple[tuple[int, ...], ...] = (), block: int = 4) -> Trace:
    columns = itertools.zip_longest(requests, hashes, fillvalue=())
    return Trace("made", tuple(TraceRequest(*lengths, tuple(ids)) for lengths, ids in columns), block)


# ------------------------------------------------------------------------------------------------ files


def test_azure_times_are_exact_and_start_at_zero(tmp_path: Path):
    trace = read_trace(write_azure(tmp_path / "azure.csv"))
    assert trace.name == "azure"
    assert trace.requests == (
        TraceRequest(0, 4808, 10, ()),
        TraceRequest(52_000_000, 3180, 8, ()),
        TraceRequest(52_000_100, 110, 27, ()),
    )


def test_mooncake_lines_keep_their_hashes(tmp_path: Path):
    rows = [
        {"timestamp": 20, "input_length": 513, "output_length": 3, "hash_ids": [0, 2]},
        {"timestamp": 10, "input_length": 512, "output_length": 4, "hash_ids": [0]},
    ]
    trace = read_trace(write_mooncake(tmp_path / "m.jsonl", rows))
    assert trace.requests == (TraceRequest(0, 512, 4, (0,)), TraceRequest(10_000_000, 513, 3, (0, 2)))
    assert len(read_trace(tmp_path / "m.jsonl", limit=1).requests) == 1


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2"),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.1,1\n", "GeneratedTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,0,1\n", "0 prompt tokens"),
        ("a.csv", "", "no request"),
        ("a.jsonl", '{"timestamp": 0}\n', "hash_ids"),
        ("a.jsonl", "[]\n", "line 1"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "1 hash_ids"),
        ("a.txt", "", "a.txt"),
        ("missing.csv", None, "missing.csv"),
    ],
)
def test_a_bad_file_is_refused_by_line_and_field(tmp_path: Path, name: str, text: str | None, told: str):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=told):
        read_trace(tmp_path / name)


# ------------------------------------------------------------------------------------------------ prompts


def test_equal_hashes_give_equal_tokens_and_others_differ_at_once():
    maker = PromptMaker(4)
    first = maker.prompt_of(0, TraceRequest(0, 10, 1, (5, 6, 7)))
    second = maker.prompt_of(1, TraceRequest(0, 11, 1, (5, 6, 8)))
    assert (len(first), len(second)) == (10, 11)
    assert first[:8] == second[:8]
    assert first[8] != second[8]


def test_hashes_beyond_one_digit_differ():
    maker = PromptMaker(2)
    prompts = {maker.prompt_of(0, TraceRequest(0, 2, 1, (h,))) for h in (0, 1, 1 << 15, (1 << 15) + 1, 182_789)}
    assert len(prompts) == 5


def test_without_hashes_no_prompt_begins_like_another():
    maker = PromptMaker(512)
    prompts = [maker.prompt_of(index, TraceRequest(0, 700, 1, ())) for index in range(50)]
    assert len({prompt[:2] for prompt in prompts}) == 50
    assert {len(prompt) for prompt in prompts} == {700}


def test_blocks_need_room_for_two_digits():
    with pytest.raises(ValueError, match="block_tokens"):
        PromptMaker(1)


def test_scaling_keeps_what_is_shared(tmp_path: Path):
    trace = read_trace(write_mooncake(tmp_path / "m.jsonl", conversations(30)))
    small = scaled(trace, length_scale=1 / 64, speed=2)
    assert small.block_tokens == 8
    for before, after in zip(trace.requests, small.requests, strict=True):
        assert after.block_hashes == before.block_hashes
        assert -(-after.num_prompt_tokens // 8) == len(before.block_hashes)
        assert after.arrival_ns == before.arrival_ns // 2
    before_reuse, after_reuse = reuse_of(trace), reuse_of(small)
    assert before_reuse is not None
    assert after_reuse is not None
    assert before_reuse[0] == after_reuse[0] > 0


def test_reuse_counts_what_came_earlier():
    trace = trace_of((0, 8, 1), (1, 10, 1), (2, 3, 1), hashes=((1, 2), (1, 2, 3), (4,)))
    assert reuse_of(trace) == (2 / 6, 8 / 21)
    assert reuse_of(trace_of((0, 8, 1))) is None


# ------------------------------------------------------------------------------------------------ fairness


@pytest.mark.parametrize(("shares", "index"), [([2, 2, 2], 1.0), ([1, 0, 0, 0], 0.25), ([0, 0], 1.0)])
def test_jain_index(shares: list[float], index: float):
    assert jain_index(shares) == index


def test_only_service_under_contention_counts():
    meter = ServiceMeter(3)
    meter.wait(0)
    meter.serve(0, 100)  # nobody else waits
    meter.advance(10)
    meter.wait(1)
    meter.advance(1_000_000_010)
    meter.serve(0, 30)
    meter.serve(1, 10)
    meter.serve(2, 50)  # does not wait
    meter.stop_waiting(0)
    meter.advance(5_000_000_000)
    assert meter.rates() == pytest.approx([30, 10])


def test_tenants_are_picked_by_hash_and_weight():
    picker = TenantPicker(3)
    picked = [picker.tenant_of(index) for index in range(1100)]
    assert [picked.count(tenant) for tenant in range(3)] == pytest.approx([600, 300, 200], rel=0.2)
    assert picked == [TenantPicker(3).tenant_of(index) for index in range(1100)]


# ------------------------------------------------------------------------------------------------ replay


def test_a_lone_request_takes_the_time_the_line_says():
    # 10 prompt tokens in one step of 1 + 10 * 0.01 ms, then a step of 1.01 ms per token.
    replay = Replay(trace_of((0, 10, 3)), options())
    replay.run()
    assert list(replay.queue_ns) == [0]
    assert list(replay.ttft_ns) == [1_100_000]
    assert list(replay.itl_ns) == [1_010_000, 1_010_000]
    assert (replay.num_finished, replay.num_steps) == (1, 3)


def test_who_comes_during_a_step_waits_for_its_end():
    # D = 1: a step is queued behind the running one as soon as there is a row for it.
    replay = Replay(trace_of((0, 10, 1), (100_000, 10, 1)), options(scheduler=SchedulerConfig(overlap_depth=0)))
    replay.run()
    assert list(replay.queue_ns) == [0, 0]
    assert list(replay.ttft_ns) == [1_100_000, 1_100_000 + 1_000_000]


def test_equal_blocks_are_found_in_the_cache():
    hashes = ((1, 2, 3), (1, 2, 4), (9, 2, 3))
    trace = trace_of((0, 12, 2), (50_000_000, 12, 2), (90_000_000, 12, 2), hashes=hashes)
    replay = Replay(trace, options())
    replay.run()
    assert replay.num_cached_tokens == 8  # two blocks of the second; the third begins otherwise
    without = Replay(trace, options(scheduler=SchedulerConfig(prefix_caching=False)))
    without.run()
    assert without.num_cached_tokens == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("num_lanes", "num_blocks"), [(1, 2048), (1, 48), (2, 128)])
def test_every_request_of_a_crowded_trace_ends_once(tmp_path: Path, depth: int, num_lanes: int, num_blocks: int):
    trace = read_trace(write_mooncake(tmp_path / "m.jsonl", conversations(120)))
    trace = scaled(trace, length_scale=1 / 64, speed=40)
    config = SchedulerConfig(overlap_depth=depth)
    changes: dict[str, object] = {"scheduler": config, "num_slots": 8 * (depth + 1), "num_blocks": num_blocks}
    replay = Replay(trace, options(**changes, num_lanes=num_lanes))
    replay.run()
    figures = figures_of(trace, replay)
    assert (replay.num_finished, figures.num_refused) == (120, 0)
    assert figures.num_output_tokens == sum(request.num_output_tokens for request in trace.requests)
    assert figures.num_invariant_checks == figures.num_steps // 7 + 1
    assert figures.trace_reuse_tokens is not None
    # Hits also come from answers and from blocks smaller than the trace's, so only roughly below.
    assert 0 < figures.prefix_hit_rate <= figures.trace_reuse_tokens + 0.05
    assert figures.queue_ms_p99 > figures.queue_ms_p50 >= 0
    assert figures.jain_index is not None
    assert 0.25 <= figures.jain_index <= 1
    assert (figures.preemptions_per_1000_tokens > 0) == (num_blocks == 48)


def test_fair_shares_are_fairer_than_arrival_order(tmp_path: Path):
    trace = read_trace(write_mooncake(tmp_path / "m.jsonl", conversations(200)))
    trace = scaled(trace, length_scale=1 / 64, speed=40)
    indices: dict[Ordering, float] = {}
    for ordering in (Ordering.FCFS, Ordering.FAIR):
        replay = Replay(trace, options(scheduler=SchedulerConfig(overlap_depth=1, ordering=ordering)))
        replay.run()
        indices[ordering] = jain_index(replay.service.rates())
    assert indices[Ordering.FAIR] > indices[Ordering.FCFS] + 0.05


def test_the_same_trace_gives_the_same_schedule(tmp_path: Path):
    trace = scaled(
        read_trace(write_mooncake(tmp_path / "m.jsonl", conversations(40))), length_scale=1 / 64, speed=9
    )
    runs = [Replay(trace, options()) for _ in range(2)]
    for replay in runs:
        replay.run()
    assert runs[0].ttft_ns == runs[1].ttft_ns
    assert runs[0].itl_ns == runs[1].itl_ns


def test_what_fits_no_lane_is_refused_and_the_context_limit_ends_answers():
    replay = Replay(trace_of((0, 5000, 1), (0, 4000, 900), (0, 5, 2)), options())
    replay.run()
    assert (replay.num_refused, replay.num_finished) == (1, 2)
    assert replay.scheduler.totals.output_tokens == 96 + 2


def test_d8_a_second_end_is_noticed():
    replay = Replay(trace_of((0, 5, 1)), options())
    replay.run()
    with pytest.raises(ReplayFailure, match="D8"):
        replay._finish(Finished(RequestKey(1), FinishReason.LENGTH, 1))


def test_d8_a_missing_end_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "commit", forgetful(Scheduler.commit, drop_ends=True))
    with pytest.raises(ReplayFailure, match="D8"):
        Replay(trace_of((0, 5, 2)), options()).run()


def test_b11_a_missing_token_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "commit", forgetful(Scheduler.commit, drop_ends=False))
    with pytest.raises(ReplayFailure, match="B11"):
        Replay(trace_of((0, 5, 2)), options()).run()


def forgetful(commit, *, drop_ends: bool):
    """`Scheduler.commit` that loses every end, or every token."""

    def commit_and_lose(self, lane_id, result):
        outcome = commit(self, lane_id, result)
        if drop_ends:
            outcome.finished = []
        else:
            outcome.keys, outcome.token_ids = [], []
        return outcome

    return commit_and_lose


def test_device_speed_is_a_line():
    assert DeviceSpeed(step_ns=5, token_ns=2).duration_ns(10) == 25


# ------------------------------------------------------------------------------------------------ command


def test_json_for_a_folder_of_traces(tmp_path: Path):
    write_azure(tmp_path / "azure.csv")
    write_mooncake(tmp_path / "moon.jsonl", conversations(20))
    result = CliRunner().invoke(
        main,
        ["traces", "--json", "--limit", "15", "--scale", "0.05", "--check-every", "5", "--num-blocks", "2048"],
        env={"STEPAHEAD_TRACES": str(tmp_path)},
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [(each["trace"], each["num_requests"]) for each in told["traces"]] == [("azure", 3), ("moon", 15)]
    assert told["traces"][0]["trace_reuse_blocks"] is None
    assert told["options"]["token_us"] == 20.0
    assert str(tmp_path) not in result.stdout


def test_the_table_names_the_trace(tmp_path: Path):
    path = write_azure(tmp_path / "azure.csv")
    result = CliRunner().invoke(main, ["traces", str(path)])
    assert result.exit_code == 0, result.output
    assert "azure" in result.stdout
    result = CliRunner().invoke(main, ["traces", "azure.csv", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "STEPAHEAD_TRACES"),
        (("nowhere.csv",), "nowhere.csv"),
        (("--folder", "."), "no .csv"),
        (("x.csv", "--max-num-seqs", "64", "--max-num-batched-tokens", "32"), "max_num_batched_tokens"),
    ],
)
def test_bad_input_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["traces", *arguments])
    assert (result.exit_code, told in result.stderr) == (2, True), result.output


def test_a_broken_rule_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "commit", forgetful(Scheduler.commit, drop_ends=True))
    result = CliRunner().invoke(main, ["traces", str(write_azure(tmp_path / "azure.csv"))])
    assert (result.exit_code, "D8" in result.stderr) == (1, True)
