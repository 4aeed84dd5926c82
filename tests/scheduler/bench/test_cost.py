"""The cost benchmark: its loads are what they say, and its subjects are driven by the rules."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepahead.scheduler.bench.__main__ import main
from stepahead.scheduler.bench.cost import Cell, Spread, growth, ratios, remarks
from stepahead.scheduler.bench.percentiles import percentile
from stepahead.scheduler.bench.subjects import CoreSubject, PeerProcess, SubjectFailed
from stepahead.scheduler.bench.workloads import WORKLOADS, Workload
from stepahead.scheduler.core.invariants import check_invariants

FAKE_PEER = Path(__file__).with_name("fake_peer.py")


def cell(subject: str, num_rows: int, cpu_us: float) -> Cell:
    return Cell(
        scenario="steady",
        num_rows=num_rows,
        subject=subject,
        num_steps=6,
        tokens_per_step=num_rows,
        cpu_us=Spread(cpu_us, cpu_us, cpu_us),
        wall_us=Spread(2 * cpu_us, 2 * cpu_us, 2 * cpu_us),
        submit_us=None,
    )


@pytest.mark.parametrize("on_wire", [False, True])
@pytest.mark.parametrize("scenario", list(WORKLOADS))
def test_a_load_stays_what_it_is(scenario: str, on_wire: bool):
    workload = WORKLOADS[scenario](64)
    subject = CoreSubject(workload, on_wire=on_wire)
    samples = subject.run(40)
    assert len(samples.wall_ns) == len(samples.cpu_ns) == 40
    scheduler = subject._scheduler
    check_invariants(scheduler)
    assert len(scheduler.sequences) == workload.num_rows + workload.backlog
    assert scheduler.totals.preemptions == 0
    if scenario != "prefill":
        # E10: who ends makes room for the next at once, so every step has all the rows.
        assert samples.num_tokens == 40 * workload.num_rows
    if workload.output_tokens is not None:
        # Little's law: as many end per step as there are places per step of a stay.
        stay = workload.output_tokens if scenario != "prefill" else workload.output_tokens * 4 / 3
        assert len(samples.submit_ns) == pytest.approx(40 * workload.num_rows / stay, rel=0.25)


def test_prefill_keeps_a_quarter_of_the_requests_reading():
    subject = CoreSubject(WORKLOADS["prefill"](64), on_wire=False)
    lane = next(iter(subject._scheduler.lanes.values()))
    shares: Counter[str] = Counter()
    for _ in range(50):
        subject.run(1)
        shares.update(prefilling=len(lane.prefilling), chunks=len(lane.in_flight[-1].explicit_rows))
    assert shares["prefilling"] / 50 == pytest.approx(16, rel=0.25)
    assert shares["chunks"] >= 50


def test_outputs_reach_their_requests():
    subject = CoreSubject(WORKLOADS["steady"](8), on_wire=True)
    before = {key: len(tokens) for key, tokens in subject._outputs.items()}
    subject.run(10)
    after = {key: len(tokens) for key, tokens in subject._outputs.items()}
    assert after == {key: count + 10 for key, count in before.items()}


def test_prompts_share_exactly_their_prefix():
    workload = WORKLOADS["prefixes"](8)
    first, other_group, same_group = (workload.prompt_of(index) for index in (0, 1, 4))
    shared = workload.shared_tokens
    assert first[:shared] == same_group[:shared] != other_group[:shared]
    assert first[shared] != same_group[shared]
    assert len(first) == workload.prompt_tokens


def test_first_requests_end_one_after_the_other():
    workload: Workload = WORKLOADS["churn"](20)
    lengths = Counter(workload.max_tokens_of(index) for index in range(20))
    assert lengths == dict.fromkeys(range(1, 11), 2)


def test_ratios_and_growth():
    cells = [cell("core", 256, 10.0), cell("core + wire", 256, 20.0), cell("other", 256, 400.0)]
    assert ratios(cells) == [
        {"scenario": "steady", "num_rows": 256, "subject": "other", "over_core": 40.0, "over_core_and_wire": 20.0}
    ]
    assert growth(cells) == []
    cells += [cell("core", 1024, 25.0)]
    assert growth(cells) == [{"scenario": "steady", "subject": "core", "ratio": 2.5}]
    assert next(iter(remarks(cells))) == "steady, core: 1024 rows cost 2.50 x 256 rows"


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)], ids=str)
def test_percentiles_are_samples(share: float, expected: int):
    assert percentile([4, 1, 3, 2], share) == expected


def test_json_holds_every_cell_beside_the_peer():
    result = CliRunner().invoke(
        main,
        ["scheduler", "--json", "--rows", "8,16", "--scenario", "steady", "--steps", "6",
         "--vs-vllm", sys.executable, "--vllm-script", str(FAKE_PEER), "--vllm-scheduler", "async"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [(c["num_rows"], c["subject"]) for c in told["cells"]] == [
        (rows, subject) for rows in (8, 16) for subject in ("core", "core + wire", "fake async")
    ]
    fake = told["cells"][2]
    assert (fake["cpu_us"]["p50"], fake["wall_us"]["p99"], fake["tokens_per_step"]) == (2.0, 3.0, 8.0)
    assert "steady, 16 rows" in result.stderr
    assert [row["num_rows"] for row in told["ratios"]] == [8, 16]


def test_the_table_is_for_people():
    result = CliRunner().invoke(main, ["scheduler", "--rows", "8", "--scenario", "steady", "--steps", "6"])
    assert result.exit_code == 0, result.output
    assert "core + wire" in result.stdout
    assert "load average" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (("--rows", "4"), 2, "--rows"),
        (("--rows", "8,x"), 2, "--rows"),
        (("--vs-vllm", "no-such-python", "--vllm-script", str(FAKE_PEER)), 1, "no-such-python"),
        (("--vs-vllm", sys.executable, "--vllm-script", "no-such-script"), 1, "no-such-script"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], exit_code: int, text: str):
    result = CliRunner().invoke(main, ["scheduler", "--rows", "8", "--steps", "6", *arguments])
    assert (result.exit_code, text in result.stderr) == (exit_code, True)


def test_a_peer_that_dies_says_why(tmp_path: Path):
    script = tmp_path / "dies.py"
    script.write_text("import sys; sys.exit('nothing to measure here')", encoding="utf-8")
    peer = PeerProcess(Path(sys.executable), script)
    with pytest.raises(SubjectFailed, match="code 1: nothing to measure here"):
        peer.ask({"run": 1})
    peer.close()
