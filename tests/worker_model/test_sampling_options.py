"""Penalties, bans and log probabilities from plan to sample (J1, J2, J3, J7, J8), on both engines and the toys."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stepahead.worker.model.registry import make_runner
from stepahead.worker.runner import SampleStatus
from tests.kernels.step_model import available_sets
from tests.worker_model.conftest import VOCAB_SIZE
from tests.worker_model.plan_driver import Asked, PlanDriver, entries_of

PROMPT = np.random.default_rng(4).integers(3, VOCAB_SIZE, 11).tolist()
ENGINES = ["torch", *(["native"] if available_sets() else [])]
MODELS = ["llama-mha", "llama-gqa-tied", "llama-biases", "qwen2", "qwen3"]
DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
OPTIONS = {
    "repetition": {"repetition_penalty": 3.0},
    "frequency": {"frequency_penalty": 4.0},
    "presence": {"presence_penalty": 8.0},
    "bias": {"bias_token_ids": [5, 9], "biases": [9.0, 8.0]},
    "bad-words": {"bad_word_lengths": [1, 2, 3], "bad_word_token_ids": [40, 7, 8, 9, 10, 11]},
    "allowed": {"allowed_token_ids": list(range(3, 40))},
    "suppressed": {"suppressed_token_ids": list(range(60, 131)), "min_tokens": 6},
}
OPTIONS["all"] = {name: value for fields in OPTIONS.values() for name, value in fields.items()}


def load(model, kernels="torch"):
    return PlanDriver(make_runner(str(model.path), dtype="float32", threads=1, kernels=kernels))


def bad_words_from(tokens):
    """Fields that forbid what the sequence would say: a word of one id, and one of three."""
    return {"bad_word_lengths": [1, 3], "bad_word_token_ids": [tokens[5], *tokens[1:4]]}


@pytest.fixture(scope="module")
def driver(tiny):
    return load(tiny("llama-gqa-tied"))


@pytest.mark.parametrize("kernels", ENGINES)
@pytest.mark.parametrize("variant", MODELS)
def test_j7_j8_raw_values_equal_transformers(tiny, variant, kernels):
    """Greedy tokens, their values and those of the prompt, whatever the chunks."""
    model = tiny(variant)
    asked = Asked(PROMPT, {"logprobs_top_k": 4, "prompt_logprobs_top_k": 3})
    driver = load(model, kernels)
    by_chunk = [driver.generate([asked], 8, chunk=chunk)[0] for chunk in (11, 4, 1)]
    history = PROMPT + model.greedy(PROMPT, 8)
    expected = torch.log_softmax(torch.tensor(model.logits(history)), -1)
    for found in by_chunk:
        assert found.tokens == history[11:]
        assert [entry.position for entry in found.prompt_logprobs] == list(range(1, 11))
        assert [entry.position for entry in found.logprobs] == list(range(11, 19))
        for entry in (*found.prompt_logprobs, *found.logprobs):
            values = expected[entry.position - 1]
            best = torch.topk(values, 3 if entry.position < 11 else 4)
            token_value = values[history[entry.position]]
            assert entry.value == pytest.approx(float(token_value), abs=1e-4)
            assert entry.rank == 1 + int((values > token_value).sum())
            assert entry.top_ids == best.indices.tolist()
            np.testing.assert_allclose(entry.top_values, best.values.numpy(), atol=1e-4)


@pytest.mark.parametrize("kernels", ENGINES)
def test_repetition_penalty_and_bad_words_equal_transformers(tiny, kernels):
    """Greedy generation by the original with its own processors; the prompt repeats none of the bad word."""
    model = tiny("llama-gqa-tied")
    words = [[word] for word in model.greedy(PROMPT, 3)[:1]] + [model.greedy(PROMPT, 6)[3:5]]
    with torch.inference_mode():
        expected = model.model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            repetition_penalty=1.4,
            bad_words_ids=words,
        )[0, len(PROMPT) :].tolist()
    fields = {
        "repetition_penalty": 1.4,
        "bad_word_lengths": [1, 2],
        "bad_word_token_ids": [token_id for word in words for token_id in word],
    }
    found = load(model, kernels).generate([Asked(PROMPT, fields)], 12)[0]
    assert found.tokens == expected
    assert found.tokens != model.greedy(PROMPT, 12)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_tokens(driver, option):
    """Else the rules below would be kept by doing nothing."""
    plain = driver.generate([Asked(PROMPT, DRAWN)], 14)[0].tokens
    fields = bad_words_from(plain) if option == "bad-words" else OPTIONS[option]
    assert driver.generate([Asked(PROMPT, DRAWN | fields)], 14)[0].tokens != plain


@pytest.mark.parametrize("base", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("option", OPTIONS)
def test_j1_a_replay_from_the_middle_and_overlap_change_nothing(driver, option, base):
    """The state comes from the history alone, and counts a token before the host knows it."""
    plain = driver.generate([Asked(PROMPT, base)], 14)[0].tokens
    fields = bad_words_from(plain) if option == "bad-words" else OPTIONS[option]
    sampling = base | fields | {"logprobs_top_k": 2, "processed_logprobs": True}
    whole = driver.generate([Asked(PROMPT, sampling)], 14)[0]
    for ahead in (1, 2):
        assert driver.generate([Asked(PROMPT, sampling)], 14, ahead=ahead)[0] == whole
    for kept in (1, 7, 13):
        resumed = driver.generate([Asked(PROMPT, sampling, whole.tokens[:kept])], 14, chunk=5)[0]
        assert resumed.tokens == whole.tokens[kept:]
        assert [entry[:1] + entry[2:4] for entry in resumed.logprobs] == [
            entry[:1] + entry[2:4] for entry in whole.logprobs[kept:]
        ]


@pytest.mark.parametrize("kernels", ENGINES)
def test_j3_strangers_change_neither_tokens_nor_values(tiny, kernels):
    driver = load(tiny("llama-gqa-tied"), kernels)
    both = {"logprobs_top_k": 2, "prompt_logprobs_top_k": 1}
    sequences = [
        Asked(PROMPT[:7], DRAWN | OPTIONS["all"] | both | {"processed_logprobs": True}),
        Asked(PROMPT[2:]),
        Asked(PROMPT[::-1], OPTIONS["repetition"] | {"logprobs_top_k": 0}),
        Asked(PROMPT[:3], DRAWN | {"seed": 9}),
        Asked(PROMPT[1:], DRAWN | both),
    ]
    alone = [driver.generate([one], 10)[0] for one in sequences]
    together = driver.generate(sequences, 10, chunk=3, ahead=1)
    for solo, batched, one in zip(alone, together, sequences, strict=True):
        assert batched.tokens == solo.tokens
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(batched, name), getattr(solo, name)
            assert [entry.top_ids for entry in ours] == [entry.top_ids for entry in theirs]
            np.testing.assert_allclose([e.value for e in ours], [e.value for e in theirs], atol=1e-4)
        assert len(batched.logprobs) == (10 if "logprobs_top_k" in one.sampling else 0)
        assert len(batched.prompt_logprobs) == (
            len(one.prompt) - 1 if "prompt_logprobs_top_k" in one.sampling else 0
        )


def test_j7_processed_values_describe_what_was_drawn_from(driver):
    """Three ids allowed, one of them cut by top-k: two values that sum to 1; the raw ones know nothing of it."""
    fields = {"temperature": 1.5, "top_k": 2, "allowed_token_ids": [50, 60, 70], "logprobs_top_k": 20}
    processed = driver.generate([Asked(PROMPT, fields | {"processed_logprobs": True})], 5)[0]
    raw = driver.generate([Asked(PROMPT, fields)], 5)[0]
    assert raw.tokens == processed.tokens
    for ours, theirs in zip(processed.logprobs, raw.logprobs, strict=True):
        assert len(ours.top_ids) == 2
        assert np.exp(ours.top_values).sum() == pytest.approx(1, abs=1e-5)
        assert ours.rank in (1, 2)
        assert len(theirs.top_ids) == 20
        assert theirs.value < ours.value


@pytest.mark.parametrize(
    "spec", ["toy:running-sum", "toy:window-sum", "toy:score-table", "toy:running-sum?reuse=off"]
)
def test_toys_with_scores_count_and_describe(spec):
    """A presence penalty above the toy's nine points: no output twice, and each value says how sure it was."""
    driver = PlanDriver(make_runner(spec))
    fields = {"presence_penalty": 20.0, "logprobs_top_k": 1, "prompt_logprobs_top_k": 0}
    for ahead in (0, 2):
        found = driver.generate([Asked([1, 2, 3], fields)], 4, chunk=2, ahead=ahead)[0]
        assert len(set(found.tokens)) == 4
        assert [entry.position for entry in found.prompt_logprobs] == [1, 2]
        assert all(-9.1 < entry.value < 0 for entry in (*found.logprobs, *found.prompt_logprobs))


def test_prompt_values_add_nothing_to_a_lesson():
    """The number of additions is the lesson: log probabilities must not show in it."""
    traces = []
    for fields in ({}, {"prompt_logprobs_top_k": 1}):
        driver = PlanDriver(make_runner("toy:running-sum?reuse=off"))
        batch = driver.build(
            rows=[(0, 0, 3, True)], admissions=[driver.admission(0, Asked([1, 2, 3], fields))], joined_slots=[0]
        )
        traces.append(driver.execute(batch).traces)
    assert traces[0] == traces[1]


def test_hash_toys_keep_the_lists_and_call_every_token_equally_likely():
    driver = PlanDriver(make_runner("toy:tagged?vocab=64"))
    fields = {"allowed_token_ids": [3, 4, 5, 6], "logprobs_top_k": 20, "prompt_logprobs_top_k": 1}
    fields |= {"bad_word_lengths": [1], "bad_word_token_ids": [6]}
    raw = driver.generate([Asked([1, 2, 3], fields)], 12)[0]
    assert set(raw.tokens) == {3, 4, 5}
    assert {round(entry.value, 5) for entry in (*raw.logprobs, *raw.prompt_logprobs)} == {round(-np.log(64), 5)}
    processed = driver.generate([Asked([1, 2, 3], fields | {"processed_logprobs": True})], 12)[0]
    assert processed.tokens == raw.tokens
    assert {tuple(entry.top_ids) for entry in processed.logprobs} == {(3, 4, 5)}
    assert {round(entry.value, 5) for entry in processed.logprobs} == {round(-np.log(3), 5)}


def test_j2_rows_that_sample_nothing_count_nothing():
    """A skipped row and the hole behind it: fed again, the sequence goes on as if nothing had happened."""
    asked = Asked([1, 2, 3], {"presence_penalty": 20.0, "logprobs_top_k": 0})
    expected = PlanDriver(make_runner("toy:running-sum")).generate([asked], 3)[0].tokens
    driver = PlanDriver(make_runner("toy:running-sum"))
    admission = driver.admission(0, asked)
    first = driver.build(rows=[(0, 0, 3, True)], admissions=[admission], joined_slots=[0])
    tokens = driver.execute(first).token_ids.tolist()
    skipped, hole = driver.build(decode=1), driver.build(decode=1)
    nothing_allowed = (np.zeros(2, np.uint8),)
    samples = driver.execute(replace(skipped, sampling=replace(skipped.sampling, masks=nothing_allowed)))
    assert samples.status.tolist() == [SampleStatus.NOTHING_ALLOWED]
    assert samples.output_logprobs is None
    samples = driver.execute(hole)
    assert samples.status.tolist() == [SampleStatus.POSITION_MISMATCH]
    assert samples.output_logprobs is None
    driver.table.note_unsampled(slot=0, incarnation=admission.incarnation, step_id=2, position=3)
    again = driver.build(rows=[(0, 3, 1, True)])
    tokens += driver.execute(again).token_ids.tolist()
    batch = driver.build(decode=1)
    samples = driver.execute(batch)
    assert tokens + samples.token_ids.tolist() == expected
    assert [entry.position for _, entry in entries_of(batch, samples.output_logprobs)] == [5]
