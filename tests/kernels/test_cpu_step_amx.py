"""The AMX path on its tile instructions in software, and on the CPU's where it has them.

The emulation is held to numbers worked out with exact fractions, the whole path to the reference and to the
AVX512-BF16 path. That a row's bits do not depend on its batch is tested with all other paths, in
`test_cpu_step_families.py` and `test_cpu_step_coded.py`; here at the sizes where tiles differ from vectors.
"""

import ctypes
import shutil
import subprocess
from fractions import Fraction

import numpy as np
import pytest
import torch

from stepahead.kernels.cpu.step.build import built_library, knows_tiles
from stepahead.kernels.cpu.step.library import InstructionSet, TensorKind, left_out_sets
from tests.kernels.step_model import (
    EMULATED,
    ReferenceDecoder,
    available_sets,
    bf16_sets,
    cases,
    emulation,
    layout_of,
    make_step,
    random_weights,
    shape_of,
)
from tests.kernels.test_cpu_step import SHAPES
from tests.kernels.test_cpu_step_families import ADDITIONS, GEMMA, MIXTURES

AMX = InstructionSet.AMX_BF16.name
PATHS = [name for name in bf16_sets() if name in (AMX, EMULATED)]
"""Both on a CPU with AMX; the emulation alone on another one with AVX512-BF16; none elsewhere."""
VECTORS = InstructionSet.AVX512_BF16.name

needs_emulation = pytest.mark.skipif(EMULATED not in PATHS, reason="no AVX512-BF16 here, which the AMX path needs")
needs_amx = pytest.mark.skipif(AMX not in PATHS, reason="this CPU has no AMX: the instructions are emulated only")


def bf16(values):
    """float32 array of bfloat16 values, and their bits."""
    rounded = torch.from_numpy(np.asarray(values, np.float32)).to(torch.bfloat16)
    return rounded.to(torch.float32).numpy(), rounded.view(torch.int16).numpy()


def emulated_multiply(a, b, c):
    """c + a by b in one instruction: bits of a [rows, 2 * pairs] and b [pairs, columns, 2], c [rows, columns]."""
    shape = np.zeros(64, np.uint8)
    shape[0] = 1
    (rows, inputs), columns = a.shape, b.shape[1]
    for tile, tile_rows, num_bytes in (
        (0, rows, 4 * columns),
        (4, rows, 2 * inputs),
        (6, inputs // 2, 4 * columns),
    ):
        shape[16 + 2 * tile], shape[48 + tile] = num_bytes, tile_rows
    result = np.ascontiguousarray(c, np.float32).copy()
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    emulation().step_emulated_multiply(
        *(ctypes.c_void_p(array.ctypes.data) for array in (shape, a, b, result)),
    )
    return result


def rounded(exact):
    """A fraction as the nearest float32, ties to even; subnormal results are zero."""
    if exact == 0:
        return Fraction(0)
    size, exponent = abs(exact), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    scale = Fraction(2) ** (23 - exponent)
    nearest = Fraction(round(exact * scale)) / scale  # Python rounds a tie to the even integer
    return nearest if abs(nearest) >= Fraction(2) ** -126 else Fraction(0)


def manual_multiply(a, b, c):
    """What the manual says of TDPBF16PS, in fractions; subnormal inputs are zero."""

    def exact(value):
        return Fraction(float(value)) if abs(float(value)) >= 2.0**-126 else Fraction(0)

    result = np.empty(c.shape, np.float32)
    for row, column in np.ndindex(*c.shape):
        even = odd = Fraction(0)
        for k in range(b.shape[0]):
            even = rounded(even + exact(a[row, 2 * k]) * exact(b[k, column, 0]))
            odd = rounded(odd + exact(a[row, 2 * k + 1]) * exact(b[k, column, 1]))
        result[row, column] = float(rounded(exact(c[row, column]) + rounded(even + odd)))
    return result


@needs_emulation
@pytest.mark.parametrize(("rows", "pairs", "columns"), [(1, 1, 1), (3, 16, 5), (16, 8, 16), (5, 3, 16)])
@pytest.mark.parametrize("spread", [2, 30, 70])
def test_the_emulation_rounds_as_the_manual_says(rows, pairs, columns, spread):
    """`spread`: products differ by up to 2 ** +-(2 * spread): sums lose bits, and at 70 products go under."""
    rng = np.random.default_rng(rows * spread)

    def random(*size):
        return rng.normal(size=size) * np.exp2(rng.integers(-spread, min(spread, 40), size))

    (a, a_bits), (b, b_bits) = bf16(random(rows, 2 * pairs)), bf16(random(pairs, columns, 2))
    c = random(rows, columns).astype(np.float32)
    expected = manual_multiply(a, b, c)
    np.testing.assert_array_equal(emulated_multiply(a_bits, b_bits, c), expected)
    if pairs > 1 and spread == 2:  # a plain sum in order is something else: the chains do matter
        pairwise = c.copy()
        for k in range(pairs):
            for odd in range(2):
                pairwise += a[:, 2 * k + odd, None] * b[None, k, :, odd]
        assert (pairwise != expected).any()


@needs_emulation
def test_the_emulation_by_hand():
    tiny, half_step = 2.0**-130, 2.0**-24
    cases = [
        # even and odd products apart, then together, then to the sum: 1 + (2^-24 + 2^-24), not (1 + 2^-24) + 2^-24
        (([half_step, half_step], [[1.0, 1.0]], 1.0), 1 + 2 * half_step),
        (([half_step, 0.0], [[1.0, 0.0]], 1.0), 1.0),  # a tie goes to the even neighbour
        (([half_step, 0.0], [[1.0, 0.0]], 1 + 2 * half_step), 1 + 4 * half_step),
        (([tiny, 0.0], [[2.0**20, 0.0]], 0.0), 0.0),  # a subnormal input counts as zero
        (([2.0**-100, 0.0], [[2.0**-30, 0.0]], 0.0), 0.0),  # a subnormal result too
        (([2.0**-100, 1.0], [[2.0**-30, 3.0]], -3.0), 0.0),
        (([0.0, 0.0], [[1.0, 1.0]], tiny), 0.0),  # and a subnormal sum
        (([256.0, 1.0], [[256.0, 1.0]], -65537.0), 0.0),
        (([3.0, 5.0], [[7.0, 11.0]], 0.5), 76.5),
    ]
    for (a, b, c), expected in cases:
        (_, a_bits), (_, b_bits) = bf16([a]), bf16([b])
        result = emulated_multiply(a_bits, b_bits, np.array([[c]], np.float32))
        assert result.tolist() == [[expected]], (a, b, c)
    (_, a_bits), (_, b_bits) = bf16([[1.0, np.nan], [1.0, 2.0], [np.inf, 1.0]]), bf16([[[1.0, 1.0]]])
    result = emulated_multiply(a_bits, b_bits, np.zeros((3, 1), np.float32))
    assert np.isnan(result[0, 0])
    assert result[1:].tolist() == [[3.0], [np.inf]]


RUNS = ([16], [8], [1], [48], [24], [40, 16], [8, 8, 8], [16, 3, 7, 32], [13, 16], [2, 9])
"""Steps of the runs of a multiplication, in whole, half and other parts of a tile."""


def multiply_runs(rows, steps, a, b, c):
    """The path's multiplication of the first rows of `a` by all of `b` [steps, 32 columns, 2]; writes to `c`."""
    lengths = np.array(steps, np.int64)
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (lengths, a, b, c)]
    strides = [ctypes.c_int64(array.strides[0] // array.itemsize) for array in (a, b, c)]
    emulation().step_emulated_runs(
        *(rows, len(steps), addresses[0], addresses[1], strides[0], addresses[2], strides[1]),
        *(addresses[3], strides[2]),
    )


@needs_emulation
def test_h7_rows_and_runs_of_every_size_are_multiplied_alike_and_touch_nothing_else():
    """Shapes follow each other in random order: what is configured for one call must not serve another one."""
    rng = np.random.default_rng(12)
    calls = [(rows, steps) for rows in range(1, 33) for steps in RUNS]
    operands, alone = {}, {}
    for steps in RUNS:
        (a, a_bits), (b, b_bits) = (
            bf16(rng.normal(size=(33, 2 * sum(steps)))),
            bf16(rng.normal(size=(sum(steps), 32, 2))),
        )
        a_bits[32], c = 0x7FC0, np.empty((1, 32), np.float32)  # a row of NaN that no call may read
        operands[tuple(steps)] = a_bits, b_bits
        alone[tuple(steps)] = np.empty((32, 32), np.float32)
        for row in range(32):
            multiply_runs(1, steps, a_bits[row:], b_bits, c)
            alone[tuple(steps)][row] = c[0]
        exact = a[:32].astype(np.float64) @ b.transpose(0, 2, 1).reshape(-1, 32)
        np.testing.assert_allclose(alone[tuple(steps)], exact, atol=2e-5)
    for index in rng.permutation(len(calls)):
        rows, steps = calls[index]
        c = np.full((34, 40), 7, np.float32)
        a, b = operands[tuple(steps)]
        multiply_runs(rows, steps, a[32 - rows :], b, c)
        np.testing.assert_array_equal(
            c[:rows, :32].view(np.uint32), alone[tuple(steps)][32 - rows :].view(np.uint32)
        )
        assert (c[rows:] == 7).all()
        assert (c[:, 32:] == 7).all()


@needs_emulation
def test_a_run_is_one_sum_after_another():
    """24 steps: an instruction of 16, then one of 8, each as the manual says."""
    rng = np.random.default_rng(13)
    (a, a_bits), (b, b_bits) = bf16(rng.normal(size=(1, 48))), bf16(rng.normal(size=(24, 32, 2)))
    c = np.empty((1, 32), np.float32)
    multiply_runs(1, [24], a_bits, b_bits, c)
    first = manual_multiply(a[:, :32], b[:16], np.zeros((1, 32), np.float32))
    np.testing.assert_array_equal(c, manual_multiply(a[:, 32:], b[16:], first))


def in_bfloat16(weights):
    """Weights as the step rounds them."""
    return {key: array if key[0] >= TensorKind.QUERY_BIAS else bf16(array)[0] for key, array in weights.items()}


def mixed_logits(decoder, vocab_size, num_blocks, block_size):
    """Logits of chunks and decodes of three sequences over shuffled blocks, from a step or the reference."""
    rng = np.random.default_rng(5)
    blocks = rng.permutation(num_blocks // 3 * 3).reshape(3, -1).tolist()
    fed, logits = [0, 0, 0], []
    for counts in ([7, 1, 130], [90, 5, 1], [1, 1, 1], [1, 33, 61]):
        layout = layout_of(list(zip(fed, counts, strict=True)), blocks, block_size)
        token_ids = rng.integers(0, vocab_size, sum(counts))
        if isinstance(decoder, ReferenceDecoder):
            logits.append(decoder.forward(token_ids, layout))
        else:
            logits.append(decoder.forward(token_ids, layout, np.arange(len(token_ids))).logits)
        fed = [start + count for start, count in zip(fed, counts, strict=True)]
    return np.concatenate(logits)


def check_against_others(path, shape, weights, block_size=16):
    """The reference differs by what bfloat16 activations cost, the vector path by the order of sums alone.

    In a mixture either may send a token to another expert, so a few logits may be anything.
    """
    num_blocks = 3 * -(-200 // block_size)
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    reference = ReferenceDecoder(shape, in_bfloat16(weights), **sizes)
    expected = mixed_logits(reference, shape.vocab_size, num_blocks, block_size)
    steps = [make_step(shape, weights, isa, dtype=torch.bfloat16, **sizes) for isa in (path, VECTORS)]
    ours, vectors = (mixed_logits(step, shape.vocab_size, num_blocks, block_size) for step in steps)
    for others, usual, largest in ((expected, 0.06, 0.12), (vectors, 0.012, 0.05)):
        differences = np.abs(ours - others)
        assert np.quantile(differences, 0.95) < usual
        assert shape.mixture or differences.max() < largest


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*SHAPES, *ADDITIONS, *MIXTURES, "gemma"])
def test_mixed_steps_equal_the_reference_in_bfloat16(name, path):
    shape = shape_of(**{**SHAPES, **ADDITIONS, **MIXTURES, "gemma": GEMMA}[name])
    weights = random_weights(shape, biases=name == "gqa", qk_norm=name in ("gqa", "head-dim-80", "gemma"))
    check_against_others(path, shape, weights)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("block_size", [1, 5, 24, 128])
def test_block_sizes_in_bfloat16(block_size, path):
    shape = shape_of()
    check_against_others(path, shape, random_weights(shape, biases=False, qk_norm=False), block_size)


@pytest.mark.parametrize(("isa", "dtype"), cases())
@pytest.mark.parametrize("visible", [1, 2, 5, 7, 9, 15, 16, 17, 31])
def test_h7_how_many_tokens_of_a_kv_tile_others_see_enters_no_sum(visible, isa, dtype):
    """Equal scores, values that cancel: a sum in another order is another number, not just in its last bit."""
    shape = shape_of(num_layers=1, num_heads=1, num_kv_heads=1, tied_head=False, attention_scale=1e-30)
    weights = {
        key: np.zeros_like(array) for key, array in random_weights(shape, biases=False, qk_norm=False).items()
    }
    rng = np.random.default_rng(visible)
    embeddings = weights[TensorKind.EMBEDDING, 0]
    embeddings[np.arange(40), np.arange(40)] = 1
    embeddings[40, 0] = -1  # the opposite of token 0
    for kind in (TensorKind.ATTENTION_NORM, TensorKind.MLP_NORM, TensorKind.FINAL_NORM):
        weights[kind, 0][:] = 1
    weights[TensorKind.VALUE, 0][:] = rng.normal(size=(32, 40))
    weights[TensorKind.VALUE, 0][:, 0] *= 2**18
    weights[TensorKind.OUTPUT, 0][:32] = np.eye(32)
    weights[TensorKind.HEAD, 0][:] = rng.normal(size=(99, 40))
    step, token_ids = make_step(shape, weights, isa, dtype=dtype), rng.integers(1, 40, 48)
    token_ids[[0, 1]] = [0, 40]
    results = []
    for count in (visible, visible + 1, visible + 2, visible + 8, 48):
        layout = layout_of([(0, count)], [[3, 1, 2]])
        results.append(step.forward(token_ids[:count], layout, np.array([visible - 1])).logits)
    follow = layout_of([(visible, 1)], [[3, 1, 2]])
    results.append(step.forward(token_ids[visible : visible + 1], follow, np.array([0])).logits)
    assert np.isfinite(results[0]).all()
    for logits in results[1:-1]:
        np.testing.assert_array_equal(logits.view(np.uint32), results[0].view(np.uint32))
    whole = step.forward(token_ids, layout_of([(0, 48)], [[3, 1, 2]]), np.array([visible])).logits
    np.testing.assert_array_equal(results[-1].view(np.uint32), whole.view(np.uint32))


COUNTS = (1, 2, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 49, 64, 65, 80, 95, 96, 97, 112, 113, 193)
"""Tokens of a step, around where rows fill a block of 16, a pass of 32 and a unit of 96."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "sizes",
    [
        # keys and values that are fetched beside a panel cut it at no multiple of 16 steps
        {"num_heads": 3, "num_kv_heads": 3, "hidden_size": 96, "intermediate_size": 160},
        {"num_heads": 5, "num_kv_heads": 1, "head_dim": 80, "tied_head": False},
        {"num_heads": 20, "num_kv_heads": 1},
    ],
)
@pytest.mark.parametrize("coded_weights", [False, True])
def test_h7_a_row_has_the_same_bits_among_any_number_of_rows(sizes, coded_weights, path):
    """One sequence after another decodes in ever larger crowds, whose contexts fill KV tiles to other extents."""
    shape = shape_of(**sizes)
    weights = random_weights(shape, biases=False, qk_norm=False)
    step = make_step(
        shape, weights, path, dtype=torch.bfloat16, num_blocks=3 * COUNTS[-1], coded_weights=coded_weights
    )
    rng = np.random.default_rng(9)
    starts = rng.integers(1, 47, COUNTS[-1]).tolist()
    blocks = rng.permutation(3 * COUNTS[-1]).reshape(-1, 3).tolist()
    nothing = np.array([], np.int64)
    for first in range(0, len(starts), 6):
        rows = [(0, start) for start in starts[first : first + 6]]
        token_ids = rng.integers(0, shape.vocab_size, sum(starts[first : first + 6]))
        step.forward(token_ids, layout_of(rows, blocks[first : first + 6]), nothing)
    token_ids = rng.integers(0, shape.vocab_size, len(starts))
    alone = [
        step.forward(token_ids[row : row + 1], layout_of([(starts[row], 1)], blocks[row : row + 1]), np.array([0]))
        for row in range(len(starts))
    ]
    expected = np.concatenate([outputs.logits for outputs in alone]).view(np.uint32)
    for count in COUNTS:
        rows = rng.permutation(len(starts))[:count]
        layout = layout_of([(starts[row], 1) for row in rows], [blocks[row] for row in rows])
        logits = step.forward(token_ids[rows], layout, np.arange(count)).logits
        np.testing.assert_array_equal(logits.view(np.uint32), expected[rows], str(count))


@needs_amx
def test_the_cpu_and_the_emulation_agree():
    """Nothing in a step needs them to round alike; that the emulation stands for the CPU does."""
    shape = shape_of(**SHAPES["head-dim-128"])
    weights = random_weights(shape, biases=True, qk_norm=True)
    steps = [make_step(shape, weights, path, dtype=torch.bfloat16) for path in (AMX, EMULATED)]
    ours, emulated = (mixed_logits(step, shape.vocab_size, 39, 16) for step in steps)
    np.testing.assert_array_equal(ours.view(np.uint32), emulated.view(np.uint32))


@pytest.mark.skipif(not available_sets(), reason="the step library cannot be built here")
def test_the_library_contains_the_instructions():
    """Unless the compiler does not know them: then the library says that it was built without."""
    if AMX in available_sets() or knows_tiles():
        assert InstructionSet.AMX_BF16 not in left_out_sets()
    if shutil.which("objdump") is None or not knows_tiles():
        pytest.skip("no objdump, or a compiler without AMX: there is nothing to look at")
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(built_library())], capture_output=True, text=True, check=True
    ).stdout
    for instruction in ("tdpbf16ps", "ldtilecfg", "tileloadd", "tilestored", "tilezero", "tilerelease"):
        assert f"\t{instruction}" in listing, instruction
