"""Coded weights (12 bits for a bfloat16, csrc/coded.h): every bit of every result equals that of plain weights."""

import numpy as np
import pytest
import torch

from stepahead.kernels.cpu.step.library import InstructionSet, TensorKind
from stepahead.kernels.cpu.step.step_shape import MixtureShape
from tests.kernels.step_model import EMULATED, bf16_sets, layout_of, make_step, random_weights, shape_of

SETS = bf16_sets()
CODING = [name for name in SETS if name != InstructionSet.AVX2.name]
"""Sets that decode; on a CPU without one every matrix stays plain."""
SHAPES = {
    "padded": {},
    "own-head": {"num_heads": 3, "num_kv_heads": 3, "tied_head": False},
    "wide": {"hidden_size": 96, "intermediate_size": 320, "head_dim": 48, "vocab_size": 70},
    "mixture": {
        "mixture": MixtureShape(
            num_experts=5, experts_per_token=2, intermediate_size=36, normalized=True, layers=(True, False)
        )
    },
}
ROWS = (1, 2, 3, 7, 11, 12, 13, 16, 17, 24, 25, 32, 33, 49, 97, 200)
"""Around what one pass, several passes and several units of a panel take."""


def logits_of(step, counts, seed=3):
    """Logits of all tokens of several steps; a step is one row of so many tokens."""
    rng = np.random.default_rng(seed)
    outputs = []
    for count in counts:
        token_ids = rng.integers(0, step._shape.vocab_size, count)
        outputs.append(step.forward(token_ids, layout_of([(0, count)], [list(range(13))]), np.arange(count)).logits)
    return np.concatenate(outputs)


def both(shape, weights, isa, **options):
    """A step with coded weights, and one with plain ones."""
    steps = [
        make_step(shape, weights, isa, dtype=torch.bfloat16, coded_weights=coded, **options)
        for coded in (True, False)
    ]
    assert np.array_equal(*(logits_of(step, ROWS).view(np.uint32) for step in steps))
    return steps


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("isa", SETS)
def test_coded_weights_change_no_bit(isa, name, num_threads):
    shape = shape_of(**SHAPES[name])
    weights = random_weights(shape, biases=name == "padded", qk_norm=False)
    coded, plain = both(shape, weights, isa, num_threads=num_threads)
    if isa in CODING:
        assert coded.stored_bytes < 0.87 * plain.stored_bytes  # narrow matrices: the tables of a panel count
    else:
        assert coded.stored_bytes == plain.stored_bytes


@pytest.mark.parametrize("isa", CODING)
def test_a_wide_matrix_takes_three_quarters(isa):
    shape = shape_of(hidden_size=1024, intermediate_size=1024, vocab_size=4096, num_heads=16, head_dim=64)
    weights = random_weights(shape, biases=False, qk_norm=False)
    coded, plain = both(shape, weights, isa)
    assert 0.75 * plain.stored_bytes < coded.stored_bytes < 0.78 * plain.stored_bytes


@pytest.mark.parametrize("isa", CODING)
def test_weights_outside_the_code_are_patched(isa):
    shape = shape_of(hidden_size=256, intermediate_size=384, vocab_size=160)
    weights = random_weights(shape, biases=False, qk_norm=False)
    rng = np.random.default_rng(8)
    for (kind, _layer), array in weights.items():
        if array.ndim == 2:  # zeros of both signs, subnormal, tiny and large ones, in places of every panel
            few = rng.choice(array.size, 12 if kind == TensorKind.HEAD else 4, replace=False)
            array.reshape(-1)[few] = np.resize(np.float32([0.0, -0.0, 1e-39, -3e-20, 40.0, -1e-30]), len(few))
    coded, plain = both(shape, weights, isa)
    assert coded.stored_bytes < 0.85 * plain.stored_bytes


@pytest.mark.parametrize("isa", CODING)
def test_a_patched_embedding_row_is_read_from_the_head(isa):
    shape = shape_of(hidden_size=128)
    weights = random_weights(shape, biases=False, qk_norm=False)
    head = weights[TensorKind.HEAD, 0]
    head[70, [0, 3, 126, 127]] = [1e-30, -1e-25, 1e4, -0.0]
    steps = both(shape, weights, isa)
    token, layout = np.array([70]), layout_of([(0, 1)], [[0]])
    one, other = (step.forward(token, layout, np.array([0])).logits for step in steps)
    assert np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("kind", [TensorKind.GATE, TensorKind.UP, TensorKind.KEY, TensorKind.DOWN, TensorKind.HEAD])
@pytest.mark.parametrize("isa", CODING)
def test_a_matrix_that_fits_no_code_stays_plain(isa, kind):
    """Exponents of one tensor are spread evenly; what shares its matrix was coded before, or comes after it."""
    shape = shape_of(hidden_size=64)
    weights = random_weights(shape, biases=False, qk_norm=False)
    rng = np.random.default_rng(9)
    array = weights[kind, 0]
    array *= np.exp2(-rng.integers(0, 60, array.shape)).astype(np.float32)
    coded, plain = both(shape, weights, isa)
    assert coded.stored_bytes < plain.stored_bytes
    # A tensor that is set once more finds the matrix as it is now.
    array[:] = rng.normal(size=array.shape)
    for step in (coded, plain):
        step.set_tensor(kind, 0, torch.from_numpy(array))
    assert np.array_equal(*(logits_of(step, (1, 13)).view(np.uint32) for step in (coded, plain)))


@pytest.mark.parametrize("kind", [TensorKind.KEY, TensorKind.OUTPUT, TensorKind.DOWN])
@pytest.mark.parametrize("isa", CODING)
def test_padding_stays_zero_where_coding_stops_half_way(isa, kind):
    """Most weights share a high byte: what padding would decode to if the coding of a vector just stopped."""
    shape = shape_of(hidden_size=46, intermediate_size=96, head_dim=46 if kind == TensorKind.KEY else 32)
    weights = random_weights(shape, biases=False, qk_norm=False)
    rng = np.random.default_rng(9)
    array = weights[kind, 0]
    array[:] = 0.5
    few = rng.choice(array.size, array.size // 12, replace=False)
    array.reshape(-1)[few] *= np.exp2(-rng.integers(0, 60, len(few))).astype(np.float32)
    both(shape, weights, isa)


@pytest.mark.parametrize("isa", CODING)
def test_a_tensor_set_again_leaves_no_patch_behind(isa):
    shape = shape_of(hidden_size=64)
    weights = random_weights(shape, biases=False, qk_norm=False)
    calm = weights[TensorKind.UP, 1].copy()
    weights[TensorKind.UP, 1][[0, 17, 18], [5, 6, 63]] = [1e-30, 1e-28, -1e-35]
    coded, _ = both(shape, weights, isa)
    coded.set_tensor(TensorKind.UP, 1, torch.from_numpy(calm))
    weights[TensorKind.UP, 1] = calm
    plain = make_step(shape, weights, isa, dtype=torch.bfloat16, coded_weights=False)
    assert np.array_equal(*(logits_of(step, (1, 13)).view(np.uint32) for step in (coded, plain)))


@pytest.mark.parametrize("isa", [name for name in CODING if name != EMULATED])
def test_float32_weights_are_never_coded(isa):
    shape = shape_of()
    weights = random_weights(shape, biases=False, qk_norm=False)
    sizes = {make_step(shape, weights, isa, coded_weights=coded).stored_bytes for coded in (True, False)}
    assert len(sizes) == 1
