"""Drawing on the step's threads against the reference (J3, J4, J6, J7, J9)."""

import numpy as np
import pytest
import torch

from stepahead.kernels.cpu.step.draw_columns import DrawColumns
from stepahead.kernels.reference.sampling import RowSampling, sample_row
from tests.kernels.step_model import available_sets, make_step, random_weights, shape_of

SETS = available_sets()
NUM_DRAWS = 150


@pytest.fixture(params=[(isa, vocab) for isa in SETS for vocab in (99, 2000, 9217)], scope="module")
def step(request):
    isa, vocab_size = request.param
    shape = shape_of(vocab_size=vocab_size, num_layers=1)
    return make_step(shape, random_weights(shape, biases=False, qk_norm=False), isa, dtype=torch.float32)


def columns(rng, rows, logits, **fixed):
    num = len(rows)
    found = {
        "temperature": rng.choice([0.05, 0.7, 1.0, 3.0], num).astype(np.float32),
        "top_p": rng.choice([1.0, 1.0, 0.3, 0.95, 0.9999], num).astype(np.float32),
        "top_k": rng.choice([0, 0, 1, 5, 40, 10**6], num).astype(np.int32),
        "min_p": rng.choice([0.0, 0.0, 0.05, 1.0], num).astype(np.float32),
        "uniform": rng.random(num),
        **fixed,
    }
    return DrawColumns(rows=rows, largest=logits[rows].max(axis=1), **found)


def expected(logits, draws):
    def row(index):
        parameters = {
            "temperature": float(draws.temperature[index]),
            "top_p": float(draws.top_p[index]),
            "top_k": int(draws.top_k[index]),
            "min_p": float(draws.min_p[index]),
            "draw": float(draws.uniform[index]),
        }
        return sample_row(logits[draws.rows[index]], RowSampling(**parameters))[0]

    return [row(index) for index in range(len(draws.rows))]


def test_mixed_parameters_give_the_tokens_of_the_reference(step):
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (20, step._shape.vocab_size)).astype(np.float32)
    logits[5] = np.round(logits[5])  # ties
    logits[6, ::2] = -np.inf
    logits[7] = 0
    draws = columns(rng, rng.integers(0, 20, NUM_DRAWS), logits)
    assert step.draw(logits, draws).tolist() == expected(logits, draws)


def test_j3_the_ends_of_the_unit_interval(step):
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 1, (3, step._shape.vocab_size)).astype(np.float32)
    logits[0, :3] = -np.inf
    rows = np.array([0, 1, 2, 0, 1, 2])
    ends = np.array([0.0, 0.0, 0.0, *[np.nextafter(1.0, 0.0)] * 3])
    draws = columns(rng, rows, logits, uniform=ends, top_k=np.zeros(6, np.int32), top_p=np.ones(6, np.float32))
    assert step.draw(logits, draws).tolist() == expected(logits, draws)


def test_wrong_draws_are_refused(step):
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1, (2, step._shape.vocab_size)).astype(np.float32)
    rows = np.array([0, 1])
    with pytest.raises(ValueError, match=r"rows must be in 0\.\.1, not 1\.\.2"):
        step.draw(logits, DrawColumns(**{**columns(rng, rows, logits).arrays(), "rows": rows + 1}))
    with pytest.raises(ValueError, match="columns of draws equally long"):
        step.draw(logits, columns(rng, rows, logits, top_k=np.zeros(1, np.int32)))
    with pytest.raises(ValueError, match="logits must be float32"):
        step.draw(logits[:, 1:], columns(rng, rows, logits))
    with pytest.raises(ValueError, match="without a finite largest logit"):
        step.draw(logits, DrawColumns(**{**columns(rng, rows, logits).arrays(), "largest": np.full(2, np.nan)}))
    with pytest.raises(ValueError, match="temperatures must be positive"):
        step.draw(logits, columns(rng, rows, logits, temperature=np.zeros(2, np.float32)))
