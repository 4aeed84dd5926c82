"""Penalties, biases and bad words: the definition, the counting form, and `transformers` (J1, J2, J11)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.kernels.cpu import penalties as counting
from stepahead.kernels.reference import penalties as reference
from stepahead.kernels.reference.penalties import MAX_SCORE, TokenRules

VOCAB_SIZE = 40


def random_logits(seed, size=VOCAB_SIZE):
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def random_rules(rng):
    """Some of the options, each as often on as off."""

    def either(value, off):
        return value if rng.integers(2) else off

    bias_ids = rng.permutation(VOCAB_SIZE)[:4] if rng.integers(2) else None
    return TokenRules(
        repetition_penalty=either(float(np.float32(rng.uniform(0.5, 2.0))), 1.0),
        frequency_penalty=either(float(np.float32(rng.normal())), 0.0),
        presence_penalty=either(float(np.float32(rng.normal())), 0.0),
        bias_ids=bias_ids,
        biases=None if bias_ids is None else rng.normal(0, 5, 4).astype(np.float32),
        bad_words=tuple(tuple(rng.integers(0, 6, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(5))),
    )


def test_every_penalty_by_hand():
    """Prompt 1 1 2, outputs 2 3 3: repetition counts the prompt, frequency and presence count outputs only (J2)."""
    logits = np.array([4.0, 4.0, -4.0, 4.0, 4.0], np.float32)
    rules = TokenRules(
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        bias_ids=np.array([3, 4]),
        biases=np.array([10.0, -1.0], np.float32),
    )
    state = counting.TokenRuleState(rules, np.array([1, 1, 2, 2, 3, 3]), 3)
    expected = [4.0, 2.0, -8.0 - 0.5 - 0.25, 2.0 - 1.0 - 0.25 + 10.0, 3.0]
    assert counting.penalised(logits, state.penalties()).tolist() == expected
    spec = reference.row_penalties(rules, [1, 1, 2, 2, 3, 3], 3)
    assert reference.penalised(logits, spec).tolist() == expected


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_j1_counting_token_by_token_equals_looking_at_the_history(seed):
    """From every point of the sequence on: a state made in the middle continues like one made at the start."""
    rng = np.random.default_rng(seed)
    rules = random_rules(rng)
    history = rng.integers(0, 6 if seed % 2 else VOCAB_SIZE, rng.integers(2, 30)).tolist()
    num_prompt = int(rng.integers(1, len(history)))
    logits = random_logits(seed)
    states = []
    for length in range(num_prompt, len(history) + 1):
        for state in states:
            state.append(history[length - 1])
        states.append(counting.TokenRuleState(rules, np.array(history[:length]), num_prompt))
        spec = reference.row_penalties(rules, history[:length], num_prompt)
        expected = reference.penalised(logits, spec)
        banned = reference.banned_ids(rules.bad_words, history[num_prompt:length])
        for state in states:
            penalties = state.penalties()
            scores = logits if penalties is None else counting.penalised(logits, penalties)
            assert np.array_equal(scores, expected)
            found = state.banned_ids()
            assert (set() if found is None else set(found.tolist())) == banned


def test_rules_without_penalties_change_no_logit():
    state = counting.TokenRuleState(TokenRules(allowed_ids=np.array([3])), np.array([1, 2]), 1)
    assert state.penalties() is None
    assert state.banned_ids() is None
    assert state.allowed_ids.tolist() == [3]


@pytest.mark.parametrize("module", [reference, counting], ids=["reference", "cpu"])
def test_extreme_options_make_no_infinity_and_keep_never(module):
    """A legal -infinity stays "never"; nothing else becomes infinite."""
    logits = np.array([2.0, -3.0, -np.inf, 1.0], np.float32)
    rules = TokenRules(
        repetition_penalty=1e-38,
        frequency_penalty=3e38,
        bias_ids=np.array([2, 3]),
        biases=np.array([3e38, 3e38], np.float32),
    )
    spec = reference.row_penalties(rules, [0, 1, 2, 3, 0], 4)
    scores = module.penalised(logits, spec)
    assert scores[2] == -np.inf
    assert scores.tolist()[0] == pytest.approx(-MAX_SCORE)
    assert scores.tolist()[3] == pytest.approx(MAX_SCORE)
    assert np.isfinite(scores[[0, 1, 3]]).all()


def test_bad_words_look_at_outputs_only():
    """The prompt ends with the word's first ids: that bans nothing until the outputs do."""
    rules = TokenRules(bad_words=((5, 6, 7), (6, 8), (9,)))
    state = counting.TokenRuleState(rules, np.array([5, 6]), 2)
    assert state.banned_ids().tolist() == [9]
    state.append(5)
    assert state.banned_ids().tolist() == [9]
    state.append(6)
    assert sorted(state.banned_ids().tolist()) == [7, 8, 9]
    state.append(1)
    assert state.banned_ids().tolist() == [9]


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
@pytest.mark.parametrize("seed", range(5))
def test_repetition_penalty_equals_transformers(penalty, seed):
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(seed)
    history, logits = rng.integers(0, VOCAB_SIZE, 25), random_logits(seed)
    processor = RepetitionPenaltyLogitsProcessor(penalty=penalty)
    expected = processor(torch.tensor(history[None]), torch.tensor(logits[None].copy()))[0].numpy()
    state = counting.TokenRuleState(TokenRules(repetition_penalty=penalty), history, 11)
    np.testing.assert_allclose(counting.penalised(logits, state.penalties()), expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_equal_transformers(seed):
    """Their processor looks at the prompt too, so the history here is all outputs."""
    from transformers import NoBadWordsLogitsProcessor

    rng = np.random.default_rng(seed)
    words = [rng.integers(0, 4, size).tolist() for size in (1, 2, 2, 3, 3)]
    outputs = rng.integers(0, 4, 12)
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=[VOCAB_SIZE - 1])
    logits = torch.tensor(random_logits(seed)[None])
    expected = torch.isneginf(processor(torch.tensor(outputs[None]), logits)[0]).nonzero()[:, 0].tolist()
    state = counting.TokenRuleState(TokenRules(bad_words=tuple(tuple(word) for word in words)), outputs, 0)
    assert sorted(set(state.banned_ids().tolist())) == expected
