"""Every figure and every variation of the teaching experiments, over real gRPC."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from stepahead.cli import lab_batch, lab_boundary, lab_generate, lab_reuse, lab_window
from stepahead.cli.failures import StackError
from stepahead.cli.lab_session import RecordedStep, lab_session
from stepahead.cli.main import main
from stepahead.cli.stack import StackOptions
from stepahead.client import AsyncClient, Delta, FinishReason
from stepahead.worker.runner import Runner, StepBatch, StepSamples
from tests.e2e.lab_stack import serve_lab

pytestmark = pytest.mark.e2e


# ------------------------------------------------------------------------------------------------ generate


@pytest.mark.parametrize(
    ("model", "limit", "token_ids", "text", "reason"),
    [
        ("toy:score-table", 8, (1, 2, 3, 4), "Small steps help", FinishReason.STOP),
        ("toy:score-table", 2, (1, 2), "Small steps", FinishReason.LENGTH),
        ("toy:score-table?loop=steps", 8, (1, 2, 2, 2, 2, 2, 2, 2), "Small" + " steps" * 7, FinishReason.LENGTH),
    ],
)
async def test_generate(model, limit, token_ids, text, reason):
    """The end token, the limit, and a model that only the limit stops (rules D2, D5)."""
    async with serve_lab(StackOptions(model=model)) as stack, AsyncClient(stack.server.address) as client:
        completion = await client.generate([0], max_tokens=limit, temperature=0.0)
    assert (completion.token_ids, completion.text, completion.finish_reason) == (token_ids, text, reason)


async def test_generate_takes_the_first_of_equals():
    """With <end> and everything better suppressed, the row of `help` holds four zeros: the smallest id wins."""
    async with (
        serve_lab(StackOptions(model="toy:score-table")) as stack,
        AsyncClient(stack.server.address) as client,
    ):
        completion = await client.generate([3], max_tokens=1, min_tokens=1, temperature=0.0)
    assert completion.token_ids == (0,)


def test_generate_says_the_same_on_its_own_page():
    assert [(case.model, case.limit, case.token_ids, case.text) for case in lab_generate.CASES] == [
        ("toy:score-table", 8, (1, 2, 3, 4), "Small steps help"),
        ("toy:score-table", 2, (1, 2), "Small steps"),
        ("toy:score-table?loop=steps", 8, (1, 2, 2, 2, 2, 2, 2, 2), "Small" + " steps" * 7),
    ]


# ------------------------------------------------------------------------------------------------ reuse


@pytest.mark.parametrize(("way", "num_additions"), [("recomputing", [4, 5, 6]), ("reusing", [4, 1, 1])])
async def test_reuse(way, num_additions):
    """15 additions against 6; at the end 7 entries of which 6 are cached (rule A1)."""
    async with serve_lab(lab_reuse.options(way)) as stack:
        outcome = await lab_reuse.play(stack.server.address, [1, 2, 3, 5], 3)
    assert outcome.token_ids == (1, 2, 4)
    assert [row.num_additions for step in outcome.steps for row in step.rows] == num_additions
    assert outcome.num_additions == {"recomputing": 15, "reusing": 6}[way]
    assert (outcome.num_history, outcome.num_cached) == (7, 6)


async def test_reuse_of_any_prompt_and_five_outputs():
    """5 n + 10 against n + 4, and both ways agree."""
    prompts = [[0], [9, 9], [1, 2, 3, 5], [3, 1, 4, 1, 5, 9, 2, 6, 5], [7] * 40]
    answers: dict[str, list[tuple[int, ...]]] = {}
    for way, additions in (("recomputing", lambda n: 5 * n + 10), ("reusing", lambda n: n + 4)):
        async with serve_lab(lab_reuse.options(way)) as stack:
            outcomes = [await lab_reuse.play(stack.server.address, prompt, 5) for prompt in prompts]
        assert [outcome.num_additions for outcome in outcomes] == [additions(len(prompt)) for prompt in prompts]
        assert [additions(len(prompt)) for prompt in prompts] == [
            lab_reuse.additions_on_paper(way, len(prompt), 5) for prompt in prompts
        ]
        answers[way] = [outcome.token_ids for outcome in outcomes]
    assert answers["recomputing"] == answers["reusing"]


# ------------------------------------------------------------------------------------------------ batch


@pytest.mark.parametrize(
    ("policy", "lengths", "late", "rounds", "num_unused", "finish"),
    [
        ("fixed", (2, 4, 1), None, "AB AB -B -B C-", 3, {"A": 2, "B": 4, "C": 5}),
        ("continuous", (2, 4, 1), None, "AB AB CB -B", 1, {"A": 2, "B": 4, "C": 3}),
        ("continuous", (2, 4, 1), 4, "AB AB -B CB", 1, {"A": 2, "B": 4, "C": 4}),
        ("fixed", (4, 4, 1), None, "AB AB AB AB C-", 1, {"A": 4, "B": 4, "C": 5}),
        ("continuous", (4, 4, 1), None, "AB AB AB AB C-", 1, {"A": 4, "B": 4, "C": 5}),
    ],
)
async def test_batch(policy, lengths, late, rounds, num_unused, finish):
    """Who held which slot in which round; the useful work is the same whatever the policy."""
    case = lab_batch.Case(policy, lengths, late)
    async with serve_lab(lab_batch.options(policy)) as stack:
        outcomes = [await lab_batch.play(stack.server.address, case) for _ in range(2)]
    for outcome in outcomes:  # the second time on a stack that is idle again, with its slots in another order
        assert outcome.rounds == tuple(rounds.split())
        assert outcome.num_unused == num_unused
        assert dict(outcome.finish) == finish
        assert outcome.num_tokens == sum(lengths)
    assert outcomes[0] in [golden.outcome for golden in lab_batch.GOLDEN if golden.case == case]


# ------------------------------------------------------------------------------------------------ window


@pytest.mark.parametrize(
    ("case", "history", "num_processed", "window", "wrong", "token_ids"),
    [
        ((3, (1, 2, 3, 5), 4), (1, 2, 3, 5, 0, 8, 3, 1), 7, (0, 8, 3), (8, 3, 1), (0, 8, 3, 1, 2)),
        ((4, (7, 9), 1), (7, 9, 6), 2, (7, 9), (7, 9, 6), (6, 2)),
        ((4, (7, 9), 4), (7, 9, 6, 2, 4, 1), 5, (9, 6, 2, 4), (6, 2, 4, 1), (6, 2, 4, 1, 3)),
    ],
)
async def test_window(case, history, num_processed, window, wrong, token_ids):
    """Rules A1, G3: what is rebuilt is what was processed; the newest token enters with the next step."""
    case = lab_window.Case(*case)
    async with serve_lab(lab_window.options(case)) as stack:
        outcome = await lab_window.play(stack.server.address, case)
    assert (outcome.history, outcome.num_processed) == (history, num_processed)
    assert outcome.num_processed == len(outcome.history) - 1
    assert outcome.window_before == outcome.window_rebuilt == window
    assert outcome.wrong_suffix == wrong
    assert outcome.token_ids == token_ids
    assert outcome.num_preemptions == 1
    assert sum((*window, history[-1])[-case.width :]) % 10 == token_ids[-1] != outcome.token_from_wrong_suffix
    assert (case, outcome) in list(zip(lab_window.CASES, lab_window.GOLDEN, strict=True))


async def test_window_without_a_loss_says_so():
    case = lab_window.CASES[0]
    roomy = lab_window.options(lab_window.Case(3, (1, 2, 3, 5), 40))
    async with serve_lab(roomy) as stack:
        with pytest.raises(StackError, match="admitted 1 times instead of twice"):
            await lab_window.play(stack.server.address, case)


# ------------------------------------------------------------------------------------------------ boundary

TABLES = {
    "on": [("prompt", ""), ("", "D1"), ("D1", "D2"), ("D2", "")],
    "off": [("prompt", ""), ("D1", ""), ("D2", ""), ("", "")],
}


@pytest.mark.parametrize("overlap", ["on", "off"])
async def test_boundary(overlap):
    """Call by call: whose results came back, whose were left; an empty queue is not idleness (rules A8, D9)."""
    async with serve_lab(lab_boundary.options(overlap)) as stack:
        outcome = await lab_boundary.play(stack.server.address, overlap)
    table = [(" ".join(call.processed), " ".join(call.retained)) for call in outcome.calls]
    assert table == TABLES[overlap]
    assert outcome.token_ids == (1, 2, 4)
    assert (outcome.num_waiting, outcome.num_in_flight) == (0, int(overlap == "on"))
    assert outcome == lab_boundary.GOLDEN[overlap]


def test_boundary_notices_a_flush_that_contradicts_the_boundaries():
    steps = [RecordedStep(step_id, True, 0, ()) for step_id in (1, 2, 3)]
    assert lab_boundary.read_calls(steps, 0)
    with pytest.raises(StackError, match="the flush brought 1 boundaries, 0 boundaries say so"):
        lab_boundary.read_calls(steps, 1)
    with pytest.raises(StackError, match="recorded steps"):
        lab_boundary.read_calls(steps[:2], 0)


# ------------------------------------------------------------------------------------------------ values


class ReusedBuffers:
    """A runner whose results live in one buffer, which the next step's forward overwrites."""

    def __init__(self, runner: Runner) -> None:
        self._forward, self._sample = runner.forward, runner.sample
        self._last: StepSamples | None = None

    def forward(self, batch: StepBatch) -> None:
        if self._last is not None:
            self._last.token_ids[:] = 777
        self._forward(batch)

    def sample(self, batch: StepBatch) -> StepSamples:
        self._last = self._sample(batch)
        return self._last


def reusing_buffers(runner: Runner) -> Runner:
    buffers = ReusedBuffers(runner)
    runner.forward, runner.sample = buffers.forward, buffers.sample  # pyright: ignore[reportAttributeAccessIssue]
    return runner


@pytest.mark.parametrize("overlap", ["on", "off"])
async def test_b10_kept_results_still_read_the_same_after_later_steps(overlap):
    """Outputs are values, never references into a pool: whoever keeps one need not copy it."""
    options = StackOptions(model="toy:tagged", overlap=overlap, scheduler_flags=("--record-steps",))
    async with (
        serve_lab(options, reusing_buffers) as stack,
        AsyncClient(stack.server.address) as client,
        lab_session(stack.server.address) as session,
    ):
        kept: list[Delta] = []
        async with client.stream([1, 2, 3], max_tokens=12, temperature=0.0, text=False) as stream:
            kept = [delta async for delta in stream]
            completion = await stream.completion()
        copies = [repr(delta) for delta in kept]
        steps = await session.steps()
        for prompt in ([4, 5], [6]):
            await client.generate(prompt, max_tokens=20, temperature=0.0, text=False)
        again = await client.generate([1, 2, 3], max_tokens=12, temperature=0.0, text=False)
        recorded = (await session.steps())[: len(steps)]
    assert [repr(delta) for delta in kept] == copies
    assert recorded == steps
    tokens = [token for delta in kept for token in delta.token_ids]
    assert tokens == list(completion.token_ids) == list(again.token_ids)
    assert tokens == [row.token_id for step in steps for row in step.rows]
    assert 777 not in tokens


# ------------------------------------------------------------------------------------------------ what goes wrong


async def test_without_recording_a_lab_says_what_is_missing():
    async with (
        serve_lab(StackOptions(model="toy:running-sum")) as stack,
        lab_session(stack.server.address) as session,
    ):
        await (await session.ask([1], 1)).tokens()
        with pytest.raises(StackError, match="--record-steps"):
            await session.steps()


async def test_a_refused_request_ends_a_lab():
    async with (
        serve_lab(StackOptions(model="toy:running-sum")) as stack,
        lab_session(stack.server.address) as session,
    ):
        with pytest.raises(StackError, match=r"refused a request: .*token_ids"):
            await session.ask([99], 1)


# ------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("generate", ["text Small steps help", "ended by the end token", "ended by the length limit"]),
        ("reuse", ["| all | | | 15 | 6 |", "tokens 1 2 3 5 > 1 2 4", "history, cache 7 entries, 6 processed"]),
        ("batch", ["| fixed (2 4 1) | 5: AB AB -B -B C- | 3 |", "| refilling (2 4 1) | 4: AB AB CB -B | 1 |"]),
        ("window", ["| window rebuilt | 0 8 3 | 7 9 | 9 6 2 4 |", "| next token | 2 | 2 | 3 |"]),
        (
            "boundary",
            [
                "| last prompt chunk | prompt | none | prompt | none |",
                "| decode D1 | none | D1 | D1 | none |",
                "| decode D2 | D1 | D2 | D2 | none |",
                "| flush | D2 | none | none | none |",
            ],
        ),
    ],
)
def test_command(name, lines):
    """The command starts real processes, prints its table and says that it is the one on paper."""
    result = CliRunner().invoke(main, ["lab", name], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    text = re.sub(r"[ \t]+", " ", result.stdout.replace("│", "|").replace("┃", "|"))
    for line in lines:
        assert line in text
    assert "on paper the same" in text
    assert "shows" in text
    assert "SOMETHING ELSE" not in text


def test_reuse_command_takes_digits_only():
    wrong = {"10": "must be digits", "-1": "'-1' is no list of token ids", ",": "',' is no list of token ids"}
    for prompt, reason in wrong.items():
        result = CliRunner().invoke(main, ["lab", "reuse", "--prompt", prompt])
        assert (result.exit_code, reason in result.stderr) == (2, True), result.stderr
