"""Sampling: the order of operations, its fast form, what must not change a token (J3, J4, J6, J7, J9, J10, I7)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.kernels.cpu.sampling import largest_ids
from stepahead.kernels.cpu.sampling import processed_log_weights as fast_log_weights
from stepahead.kernels.cpu.sampling import sample_row as fast_row
from stepahead.kernels.reference.penalties import TokenRules, row_penalties
from stepahead.kernels.reference.philox import draw_uniform
from stepahead.kernels.reference.sampling import (
    TILE,
    RowSampling,
    RowStatus,
    as_tiles,
    cumulative_mass,
    pick,
    processed_log_weights,
    sample_row,
)

BOTH = pytest.mark.parametrize("sample", [sample_row, fast_row], ids=["reference", "cpu"])


def packed(allowed, vocab_size):
    bits = np.zeros(vocab_size, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little")


def draws(num):
    return draw_uniform(np.full(num, 11, np.uint64), np.zeros(num, np.int64), np.arange(num))


def frequencies(sample, logits, num=4000, **parameters):
    tokens = [sample(logits, RowSampling(draw=float(u), **parameters))[0] for u in draws(num)]
    return np.bincount(tokens, minlength=len(logits))


def assert_distributed(counts, probabilities):
    """Chi-square at the 0.999 quantile, by Wilson and Hilferty's approximation; the draws are fixed."""
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    used = expected > 0
    degrees = used.sum() - 1
    chi_square = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    assert chi_square < degrees * (1 - 2 / (9 * degrees) + 3.09 * np.sqrt(2 / (9 * degrees))) ** 3


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 0.5, 2.0, 1.5, 0.0], np.float32)


@BOTH
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(sample, temperature):
    counts = frequencies(sample, LOGITS, temperature=temperature)
    assert_distributed(counts, softmax(LOGITS.astype(np.float64) / temperature))


@BOTH
def test_top_k_keeps_the_k_largest(sample):
    kept = np.isin(np.arange(8), [1, 2, 5])
    counts = frequencies(sample, LOGITS, temperature=1.0, top_k=3)
    assert_distributed(counts, softmax(np.where(kept, LOGITS.astype(np.float64), -np.inf)))


@BOTH
def test_top_p_keeps_the_shortest_run(sample):
    probabilities = softmax(LOGITS.astype(np.float64))
    top = np.sort(probabilities)[::-1]
    counts = frequencies(sample, LOGITS, temperature=1.0, top_p=float(top[:2].sum() + top[2] / 2))
    kept = np.isin(np.arange(8), [1, 2, 5])
    assert_distributed(counts, np.where(kept, probabilities, 0) / probabilities[kept].sum())


@BOTH
def test_min_p_is_relative_to_the_largest(sample):
    probabilities = softmax(LOGITS.astype(np.float64))
    kept = probabilities >= 0.2 * probabilities.max()
    assert 1 < kept.sum() < 8
    counts = frequencies(sample, LOGITS, temperature=1.0, min_p=0.2)
    assert_distributed(counts, np.where(kept, probabilities, 0) / probabilities[kept].sum())


@BOTH
def test_mix_of_all(sample):
    logits = np.random.default_rng(3).normal(0, 2, 600).astype(np.float32)
    scaled = logits.astype(np.float64) / 1.3
    order = np.argsort(-scaled, kind="stable")
    kept = np.zeros(600, bool)
    kept[order[:40]] = True
    weights = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
    kept[order[np.cumsum(weights[order]) - weights[order] >= 0.8 * weights.sum()]] = False
    weights = np.where(kept, weights, 0.0)
    weights[weights < 0.15 * weights.max()] = 0.0
    counts = frequencies(sample, logits, temperature=1.3, top_k=40, top_p=0.8, min_p=0.15)
    assert_distributed(counts, weights / weights.sum())


HISTORY, NUM_PROMPT = [0, 1, 1, 5, 5, 6, 5, 9, 11], 4
RULES = TokenRules(
    repetition_penalty=1.5,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    bias_ids=np.array([2, 5]),
    biases=np.array([1.5, 2.5], np.float32),
)
MIXES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.6, "top_k": 9},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


def exact_distribution(logits, temperature, top_p=1.0, top_k=0, min_p=0.0):
    """The definition, id by id in Python floats: penalties, bias, bans, then the filters one after another."""
    outputs = HISTORY[NUM_PROMPT:]
    scores = {}
    for token_id, logit in enumerate(logits.tolist()):
        score = logit
        if token_id in HISTORY:
            score = logit / 1.5 if logit > 0 else logit * 1.5
        score -= 0.4 * outputs.count(token_id) + 0.3 * (token_id in outputs)
        score += {2: 1.5, 5: 2.5}.get(token_id, 0.0)
        if token_id not in (7, 8) and token_id < 25:
            scores[token_id] = score / temperature
    best = sorted(scores, key=lambda token_id: -scores[token_id])[: top_k or None]
    weights = {token_id: np.exp(scores[token_id] - scores[best[0]]) for token_id in best}
    total, run, kept = sum(weights.values()), 0.0, {}
    for token_id in best:
        if run < top_p * total:
            kept[token_id] = weights[token_id]
        run += weights[token_id]
    kept = {token_id: weight for token_id, weight in kept.items() if weight >= min_p}
    probabilities = np.zeros(len(logits))
    probabilities[list(kept)] = np.array(list(kept.values())) / sum(kept.values())
    return probabilities


@BOTH
@pytest.mark.parametrize("mix", MIXES)
def test_j7_frequencies_and_processed_values_follow_the_definition(sample, mix):
    """What is reported is what is drawn from: both against the same exact distribution."""
    logits = np.random.default_rng(8).normal(0, 1.5, 30).astype(np.float32)
    rules = {
        "penalties": row_penalties(RULES, HISTORY, NUM_PROMPT),
        "banned": np.array([7]),
        "suppressed": np.array([8]),
        "allowed": np.arange(25),
    }
    expected = exact_distribution(logits, **mix)
    assert 1 < np.count_nonzero(expected) < 24
    assert_distributed(frequencies(sample, logits, num=2000, **mix, **rules), expected)
    log_weights = processed_log_weights if sample is sample_row else fast_log_weights
    weights = np.exp(log_weights(logits, RowSampling(**mix, **rules)).astype(np.float64))
    np.testing.assert_allclose(weights / weights.sum(), expected, atol=1e-6)


@BOTH
def test_j7_processed_values_of_a_greedy_row_are_at_temperature_one(sample):
    log_weights = processed_log_weights if sample is sample_row else fast_log_weights
    sampling = RowSampling(banned=np.array([1]), top_k=1)
    assert sample(LOGITS, sampling) == (2, RowStatus.OK)
    expected = np.where(np.arange(8) == 1, -np.inf, LOGITS)
    assert log_weights(LOGITS, sampling).tolist() == expected.tolist()


@BOTH
def test_nothing_left_by_the_lists_together(sample):
    sampling = RowSampling(allowed=np.array([3, 4]), banned=np.array([3]), suppressed=np.array([4]))
    assert sample(LOGITS, sampling)[1] == RowStatus.NOTHING_ALLOWED


@BOTH
def test_j9_greedy_takes_the_lowest_id_of_a_tie(sample):
    logits = np.zeros(1000, np.float32)
    logits[[400, 401, 999]] = 5.0
    for temperature in (0.0, 9e-6):
        assert sample(logits, RowSampling(temperature=temperature)) == (400, RowStatus.OK)


@BOTH
def test_j9_tiny_temperature_above_epsilon_is_finite(sample):
    assert sample(LOGITS, RowSampling(temperature=2e-5, draw=0.999)) == (1, RowStatus.OK)


@BOTH
@pytest.mark.parametrize("top_k", [0, 8, 9, 10**6])
def test_j9_top_k_of_zero_or_the_whole_vocabulary_is_off(sample, top_k):
    for draw in draws(50):
        plain = sample(LOGITS, RowSampling(temperature=1.0, draw=float(draw)))
        assert sample(LOGITS, RowSampling(temperature=1.0, draw=float(draw), top_k=top_k)) == plain


@BOTH
def test_top_k_tie_at_the_edge_keeps_lower_ids(sample):
    logits = np.array([2.0, 1.0, 1.0, 1.0], np.float32)
    counts = frequencies(sample, logits, num=500, temperature=1.0, top_k=2)
    assert counts[2:].sum() == 0
    assert counts[1] > 0


@BOTH
def test_tiny_top_p_keeps_one(sample):
    assert {sample(LOGITS, RowSampling(temperature=1.0, top_p=1e-9, draw=float(u)))[0] for u in draws(50)} == {1}


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_j10_non_finite_rows_are_reported(sample, temperature):
    for bad in (np.nan, np.inf):
        logits = LOGITS.copy()
        logits[3] = bad
        assert sample(logits, RowSampling(temperature=temperature))[1] == RowStatus.NON_FINITE
    nothing = np.full(8, -np.inf, np.float32)
    assert sample(nothing, RowSampling(temperature=temperature))[1] == RowStatus.NON_FINITE


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_minus_infinity_is_never_drawn(sample, temperature):
    logits = np.where(np.arange(8) == 6, LOGITS, np.float32(-np.inf)).astype(np.float32)
    assert sample(logits, RowSampling(temperature=temperature, draw=0.7)) == (6, RowStatus.OK)


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_i7_mask_and_suppressed_ids(sample, temperature):
    mask = packed([0, 3, 7], 8)
    for draw in draws(50):
        sampling = RowSampling(temperature=temperature, draw=float(draw), mask=mask, suppressed=np.array([0]))
        assert sample(LOGITS, sampling)[0] in (3, 7)
    nothing = RowSampling(temperature=temperature, mask=mask, suppressed=np.array([0, 3, 7]))
    assert sample(LOGITS, nothing)[1] == RowStatus.NOTHING_ALLOWED


@BOTH
def test_j6_suppressed_id_is_legal_again_when_no_longer_named(sample):
    assert sample(LOGITS, RowSampling(suppressed=np.array([1])))[0] == 2
    assert sample(LOGITS, RowSampling())[0] == 1


def picked(masses, draw):
    tile, offset = pick(as_tiles(masses), draw)
    return tile * TILE + offset


def test_pick_never_leaves_the_drawable_ids():
    masses = np.zeros(TILE * 3 + 5, np.float32)
    masses[[3, TILE + 1, TILE * 2]] = [0.1, 0.7, 0.2]
    assert [picked(masses, u) for u in (0.0, 0.09, 0.11, 0.79, 0.81)] == [3, 3, TILE + 1, TILE + 1, TILE * 2]
    assert picked(masses, float(np.nextafter(1.0, 0.0))) == TILE * 2


def test_empty_tiles_change_no_sum():
    tiles = np.exp(np.random.default_rng(0).normal(0, 9, (50, TILE))).astype(np.float32)
    tiles[::3] = 0
    used = np.flatnonzero(tiles.any(axis=1))
    assert (cumulative_mass(tiles)[used] == cumulative_mass(tiles[used])).all()


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(2, 3000),
    levels=st.sampled_from([3, 50, 10**6]),
    top_k=st.integers(0, 400),
    top_p=st.sampled_from([1.0, 0.999999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    temperature=st.sampled_from([0.0, 0.2, 1.0, 50.0]),
    draw=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_fast_form_equals_the_reference(seed, vocab_size, levels, top_k, top_p, min_p, temperature, draw):
    rng = np.random.default_rng(seed)
    # few levels: many ties, as bfloat16 logits have
    logits = (rng.integers(0, levels, vocab_size) * (12.0 / levels)).astype(np.float32)
    mask = packed(rng.integers(0, vocab_size, vocab_size), vocab_size) if seed % 3 == 0 else None
    suppressed = rng.integers(0, vocab_size, 3) if seed % 2 else None
    ids = rng.permutation(vocab_size)[: int(rng.integers(1, 50))]
    rules = TokenRules(
        repetition_penalty=float(rng.choice([1.0, 0.5, 1.7])),
        frequency_penalty=float(rng.choice([0.0, 0.25, 12.0 / levels])),
        presence_penalty=float(rng.choice([0.0, 1.0])),
        bias_ids=ids[:3],
        biases=rng.integers(-2, 3, len(ids[:3])).astype(np.float32),
    )
    history = ids[rng.integers(0, len(ids), 20)].tolist()
    sampling = RowSampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        draw=draw,
        mask=mask,
        suppressed=suppressed,
        penalties=row_penalties(rules, history, 9) if seed % 5 else None,
        banned=ids[-2:] if seed % 7 == 0 else None,
        allowed=rng.permutation(vocab_size)[: vocab_size // 2 + 1] if seed % 11 == 0 else None,
    )
    token, status = sample_row(logits, sampling)
    assert fast_row(logits, sampling) == (token, status)
    if status == RowStatus.OK:
        weights = fast_log_weights(logits, sampling)
        assert np.array_equal(weights, processed_log_weights(logits, sampling))
        assert np.isfinite(weights[token])


@given(st.integers(0, 2**32), st.integers(2, 2000), st.data())
@settings(max_examples=100, deadline=None)
def test_largest_ids_are_those_of_a_stable_sort(seed, size, data):
    scores = np.random.default_rng(seed).integers(0, 40, size).astype(np.float32)
    count = data.draw(st.integers(1, size - 1))
    expected = np.sort(np.argsort(-scores, kind="stable")[:count])
    assert largest_ids(scores, count).tolist() == expected.tolist()
