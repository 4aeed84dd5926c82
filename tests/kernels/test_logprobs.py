"""Log probabilities: the definition against torch, its fast form, and what is reported where none exist (J7)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.kernels.cpu import logprobs as fast
from stepahead.kernels.reference import logprobs as reference
from stepahead.kernels.reference.logprobs import LOWEST

BOTH = pytest.mark.parametrize("describe", [reference.token_logprob, fast.token_logprob], ids=["reference", "cpu"])


@BOTH
@pytest.mark.parametrize("seed", range(5))
def test_j7_raw_values_equal_torch(describe, seed):
    logits = np.random.default_rng(seed).normal(0, 4, 700).astype(np.float32)
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)
    best = torch.topk(expected, 5)
    for token_id in (0, 350, int(best.indices[3])):
        found = describe(logits, token_id, 5)
        assert found.value == pytest.approx(float(expected[token_id]), abs=1e-5)
        assert found.rank == 1 + int((expected > expected[token_id]).sum())
        assert found.top_ids.tolist() == best.indices.tolist()
        np.testing.assert_allclose(found.top_values, best.values.numpy(), atol=1e-5)


@BOTH
def test_ties_share_the_better_rank_and_list_lower_ids_first(describe):
    logits = np.zeros(600, np.float32)
    logits[[300, 7]] = 2.0
    found = describe(logits, 500, 4)
    assert (found.rank, found.top_ids.tolist()) == (3, [7, 300, 0, 1])
    assert [describe(logits, token_id, 0).rank for token_id in (7, 300)] == [1, 1]
    assert len(describe(logits, 7, 0).top_ids) == 0


@BOTH
def test_j7_impossible_ids_are_not_listed_and_every_value_is_finite(describe):
    logits = np.full(9, -np.inf, np.float32)
    logits[[2, 5, 6]] = [0.0, 3.0, -3e38]
    found = describe(logits, 2, 20)
    assert found.top_ids.tolist() == [5, 2, 6]
    assert found.top_values[2] == LOWEST
    impossible = describe(logits, 0, 1)
    assert (impossible.value, impossible.rank) == (LOWEST, 4)


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_distribution_has_no_values(describe, bad):
    logits = np.full(6, -np.inf, np.float32)
    logits[3] = bad
    found = describe(logits, 1, 3)
    assert (found.value, found.rank, len(found.top_ids)) == (LOWEST, 1, 0)


@given(st.integers(0, 2**32), st.integers(1, 2000), st.integers(0, 20), st.sampled_from([3, 100, 10**6]))
@settings(max_examples=150, deadline=None)
def test_fast_form_equals_the_reference(seed, vocab_size, top_k, levels):
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, levels, vocab_size) * (12.0 / levels)).astype(np.float32)
    logits[rng.integers(0, vocab_size, vocab_size // 3)] = -np.inf
    token_id = int(rng.integers(vocab_size))
    expected, found = (module.token_logprob(logits, token_id, top_k) for module in (reference, fast))
    assert (found.rank, found.top_ids.tolist()) == (expected.rank, expected.top_ids.tolist())
    np.testing.assert_allclose(found.value, expected.value, atol=1e-5)
    np.testing.assert_allclose(found.top_values, expected.top_values, atol=1e-5)


def test_rows_become_columns_entry_after_entry():
    logits = np.array([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 9.0, 0.0]], np.float32)
    entries = fast.row_logprobs(logits, np.array([1, 2, 1]), np.array([2, 0, 1]))
    assert entries.top_counts.tolist() == [2, 0, 1]
    assert entries.top_ids.tolist() == [2, 1, 1]
    assert entries.ranks.tolist() == [2, 2, 1]
    assert entries.values.dtype == entries.top_values.dtype == np.float32
    assert entries.top_values[1] == entries.values[0]
