"""Replays of window layers through the real stack: whoever was preempted, lost a worker or hit a prefix is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e import stack as e2e
from tests.e2e.processes import free_port, run
from tests.e2e.test_windows import PROMPTS, SIZES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

WINDOW = SIZES["sliding_window"]


def saved(family: str, path: Path) -> str:
    """Two layers with a window: Mistral's are all there are, Gemma 2 has as many without."""
    import torch
    import transformers

    torch.manual_seed(5)
    own = {"head_dim": 8} if family == "Gemma2" else {"num_hidden_layers": 2}
    sizes = SIZES | {"max_position_embeddings": 2048} | own
    config = getattr(transformers, f"{family}Config")(**sizes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("Mistral", tmp_path_factory.mktemp("mistral"))


def told(answer: e2e.Answer) -> tuple[int, int, int | None]:
    """Window replays, approximate ones, and the first output that may show it."""
    assert answer.ok, answer
    choice = answer.choice
    assert choice is not None
    first = choice.first_approximate_token_index if choice.HasField("first_approximate_token_index") else None
    return choice.window_replays, choice.approximate_replays, first


@pytest.mark.parametrize("tokens", [0, WINDOW - 1])
async def test_n8_a_preempted_request_says_whether_its_replay_was_exact(mistral: str, tokens: int) -> None:
    """Six blocks of four: the long one has to give way to the older one, whose window fills."""
    # Steps long enough for the second request to come while the first is still short.
    worker = {"num_kv_blocks": 6, "max_model_len": 200, "max_num_seqs": 4, "step_s": 0.01}
    short, long = e2e.request([5], 30, ignore_eos=True), PROMPTS[0]
    async with e2e.serve(mistral, worker=worker, prefix_caching=False) as stack:
        asked = e2e.request(long, 30, ignore_eos=True, approximate_replay_tokens=tokens)
        alone = await stack.answer(e2e.request(long, 30, ignore_eos=True))
        assert told(alone) == (0, 0, None)
        answers = await asyncio.gather(stack.answer(short), stack.answer(asked))
        assert answers[1].finished is not None
        assert answers[1].finished.timings.preemptions == 1
        replays, approximate, first = told(answers[1])
        assert (told(answers[0]), replays, approximate) == ((0, 0, None), 1, int(tokens > 0))
        kept = 30 if first is None else first
        assert answers[1].token_ids[:kept] == alone.token_ids[:kept]
        totals = (await stack.status()).totals
        assert (totals.window_replays, totals.approximate_replays) == (1, approximate)
        await stack.assert_quiescent()


async def test_n8_o1_requests_of_a_killed_worker_go_on_exactly_or_as_they_asked(
    mistral: str, tmp_path: Path
) -> None:
    """Both were told apart on the way, and the exact one has the tokens of an answer that nothing disturbed."""
    flags = [
        *("--model", mistral, "--listen", f"127.0.0.1:{free_port()}", "--max-model-len", "1800"),
        *("--max-num-batched-tokens", "32", "--block-size", "4", "--num-kv-blocks", "64", "--resume-grace", "0.5"),
    ]
    exact = e2e.request(PROMPTS[0], 1500, ignore_eos=True)
    bounded = e2e.request(PROMPTS[3], 1500, ignore_eos=True, approximate_replay_tokens=WINDOW)
    async with (
        run("worker", *flags, log=tmp_path / "first.log") as first,
        e2e.serve_scheduler(first.address) as stack,
    ):
        await e2e.eventually(lambda: bool(stack.server.engine.links))
        calls = [(stack.open(message), e2e.Answer()) for message in (exact, bounded)]
        await asyncio.gather(*(e2e.read_events(call, "delta", answer, count=2) for call, answer in calls))
        await first.kill()
        async with run("worker", *flags, log=tmp_path / "second.log"):
            answers = await asyncio.gather(*(e2e.fold(call, answer) for call, answer in calls))
            assert told(answers[0]) == (1, 0, None)
            replays, approximate, begin = told(answers[1])
            assert (replays, approximate) == (1, 1)
            assert begin is not None
            assert 1 <= begin < 1500
            assert [len(answer.token_ids) for answer in answers] == [1500, 1500]
            assert (await stack.answer(exact)).token_ids == answers[0].token_ids
            await stack.assert_quiescent()


async def test_n12_a_prefix_whose_window_is_gone_is_still_a_hit(tmp_path: Path) -> None:
    """Of 88 cached positions 16 are fed again for the windows, 8 if the request says so."""
    path = saved("Gemma2", tmp_path)
    worker = {"num_kv_blocks": 512, "max_model_len": 200, "max_num_seqs": 2}
    async with e2e.serve(path, worker=worker) as stack:
        cold = await stack.generate([*PROMPTS[3], 5], 10, ignore_eos=True, cache_salt="cold")
        await stack.generate(PROMPTS[3], 1)
        found: list[tuple[int, tuple[int, int, int | None]]] = []
        for tokens in (0, WINDOW - 1):
            for other in range(3):
                await stack.generate([other + 5] * 100, 1)
            answer = await stack.generate([*PROMPTS[3], 5], 10, ignore_eos=True, approximate_replay_tokens=tokens)
            assert answer.started is not None
            found.append((answer.started.cached_prompt_tokens, told(answer)))
            if not tokens:
                assert answer.token_ids == cold.token_ids
        assert found == [(72, (1, 0, None)), (80, (1, 1, 0))]
        refused = await stack.generate(PROMPTS[3], 1, approximate_replay_tokens=WINDOW - 2)
        assert refused.fields == ["scheduling.approximate_replay_tokens"]
        await stack.assert_quiescent()
