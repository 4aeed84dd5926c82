"""The compiled step against the NumPy reference, at sizes that fit no tile, and what it refuses."""

import os
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from stepahead.kernels.cpu.step.decoder_step import DecoderStep
from stepahead.kernels.cpu.step.library import InstructionSet, Phase, Probe, TensorKind
from stepahead.kernels.cpu.step.step_cache import check_entries, step_arrays
from tests.kernels.step_model import (
    ReferenceDecoder,
    available_sets,
    bf16_sets,
    cases,
    layout_of,
    make_step,
    random_weights,
    shape_of,
)

SETS = available_sets()
SHAPES = {
    "gqa": {},
    "mha-own-head": {"num_heads": 3, "num_kv_heads": 3, "tied_head": False},
    "mqa-wide-group": {"num_heads": 50, "num_kv_heads": 1},  # more query heads than an attention task has rows
    "head-dim-16": {"head_dim": 16},
    "head-dim-64": {"head_dim": 64},
    "head-dim-80": {"head_dim": 80},
    "head-dim-96": {"head_dim": 96, "num_heads": 9, "num_kv_heads": 3},
    "head-dim-112": {"head_dim": 112, "num_heads": 5, "num_kv_heads": 1},
    "head-dim-128": {"head_dim": 128, "num_heads": 6},
    "head-dim-256": {"head_dim": 256, "num_heads": 2, "num_kv_heads": 1},
    "one-of-each": {"num_layers": 1, "hidden_size": 1, "intermediate_size": 1, "vocab_size": 2, "head_dim": 2},
}


def feed(step, reference, rows, tables, rng, block_size=16):
    """Feeds random tokens; returns the step's logits and the reference's, of all tokens."""
    layout = layout_of(rows, tables, block_size)
    token_ids = rng.integers(0, step._shape.vocab_size, len(layout.positions))
    outputs = step.forward(token_ids, layout, np.arange(len(token_ids)))
    np.testing.assert_array_equal(outputs.best_ids, outputs.logits.argmax(axis=1))
    np.testing.assert_array_equal(outputs.best_logits, outputs.logits.max(axis=1))
    return outputs.logits, reference.forward(token_ids, layout)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_equal_the_reference(name, isa):
    rng = np.random.default_rng(5)
    shape = shape_of(**SHAPES[name])
    weights = random_weights(shape, biases=name == "gqa", qk_norm=name in ("gqa", "head-dim-80"))
    step, reference = make_step(shape, weights, isa), ReferenceDecoder(shape, weights)
    blocks = rng.permutation(40).reshape(4, 10).tolist()
    fed = [0, 0, 0, 0]
    for counts in ([7, 1, 30, 12], [1, 5, 1, 1], [1, 1, 1, 1], [4, 100, 9, 1], [1, 1, 1, 20], [1, 33, 1, 1]):
        order = rng.permutation(4)
        rows = [(fed[row], counts[row]) for row in order]
        ours, expected = feed(step, reference, rows, [blocks[row] for row in order], rng)
        np.testing.assert_allclose(ours, expected, atol=2e-5)
        fed = [start + count for start, count in zip(fed, counts, strict=True)]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 128])
def test_block_sizes(block_size, isa):
    rng = np.random.default_rng(6)
    shape = shape_of()
    weights = random_weights(shape, biases=False, qk_norm=False)
    num_blocks = -(-330 // block_size) + 1
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    step, reference = make_step(shape, weights, isa, **sizes), ReferenceDecoder(shape, weights, **sizes)
    table = [rng.permutation(num_blocks).tolist()]
    for rows in ([(0, 30)], [(30, 1)], [(31, 260)], [(291, 1)], [(292, 38)]):
        ours, expected = feed(step, reference, rows, table, rng, block_size)
        np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize("isa", bf16_sets())
@pytest.mark.parametrize("block_size", [1, 5])
def test_blocks_of_odd_size_in_bfloat16(block_size, isa):
    """The values of two tokens are multiplied at once; the last token of an odd block has no partner."""
    shape = shape_of()
    weights = random_weights(shape, biases=False, qk_norm=False)
    token_ids, logits = np.random.default_rng(6).integers(0, shape.vocab_size, 64), []
    for size in (block_size, 16):
        step = make_step(shape, weights, isa, dtype=torch.bfloat16, num_blocks=80, block_size=size)
        layout = layout_of([(0, 64)], [np.random.default_rng(7).permutation(80).tolist()], size)
        logits.append(step.forward(token_ids, layout, np.arange(64)).logits)
    np.testing.assert_allclose(*logits, atol=0.06)


@pytest.fixture(params=cases())
def small(request):
    """A small step and its weights."""
    shape = shape_of()
    weights = random_weights(shape, biases=False, qk_norm=False)
    isa, dtype = request.param
    return make_step(shape, weights, isa, dtype=dtype), weights


def nan_of(part):
    """The NaN of a cache: of a float32 one, or the bits of a bfloat16 one."""
    return 0x7FC0 if part.dtype == np.uint16 else np.nan


TOKENS = np.array([5, 6, 7, 8, 9])
LAYOUT = layout_of([(0, 4), (0, 1)], [[3], [8]])
LAST = np.array([3, 4])


def test_the_lowest_id_wins_a_tie(small):
    step, weights = small
    head = weights[TensorKind.HEAD, 0].copy()
    best = step.forward(TOKENS, LAYOUT, LAST).best_ids
    head[(best[0] + 40) % 99] = head[(best[0] - 40) % 99] = head[best[0]]
    step.set_tensor(TensorKind.HEAD, 0, torch.from_numpy(head))
    outputs = step.forward(TOKENS, LAYOUT, LAST)
    np.testing.assert_array_equal(outputs.best_ids, outputs.logits.argmax(axis=1))
    assert (outputs.logits[0] == outputs.best_logits[0]).sum() == 3


def test_j10_a_nan_in_the_logits_is_told(small):
    step, weights = small
    head = weights[TensorKind.HEAD, 0].copy()
    head[97] = np.nan
    step.set_tensor(TensorKind.HEAD, 0, torch.from_numpy(head))
    assert np.isnan(step.forward(TOKENS, LAYOUT, LAST).best_logits).all()


def test_j10_stale_nan_of_a_former_owner_stays_out(small):
    step, _ = small
    expected = step.forward(TOKENS, LAYOUT, LAST).logits
    for part in step.cache_memory():
        part[:] = nan_of(part)
    np.testing.assert_array_equal(step.forward(TOKENS, LAYOUT, LAST).logits, expected)


def test_j10_a_row_of_nan_fails_alone(small):
    step, _ = small
    follow = layout_of([(4, 1), (1, 1)], [[3], [8]])
    step.forward(TOKENS, LAYOUT, LAST)
    expected = step.forward(TOKENS[:2], follow, np.arange(2)).logits
    for part in step.cache_memory():
        part[:, 3] = nan_of(part)
    outputs = step.forward(TOKENS[:2], follow, np.arange(2))
    assert np.isnan(outputs.best_logits).tolist() == [True, False]
    np.testing.assert_array_equal(outputs.logits[1], expected[1])


def test_no_logits_are_computed_unless_asked_for(small):
    outputs = small[0].forward(TOKENS, LAYOUT, np.array([], np.int64))
    assert outputs.logits.shape == (0, 99)


def test_logits_go_where_the_caller_says(small):
    step, _ = small
    expected = step.forward(TOKENS, LAYOUT, LAST).logits
    memory = np.full((2, 99), 7, np.float32)
    assert step.forward(TOKENS, LAYOUT, LAST, logits=memory).logits is memory
    np.testing.assert_array_equal(memory, expected)
    for wrong in (np.zeros((3, 99), np.float32), np.zeros((2, 99)), np.zeros((99, 2), np.float32).T):
        with pytest.raises(ValueError, match=r"logits must be float32 \[2, 99\]"):
            step.forward(TOKENS, LAYOUT, LAST, logits=wrong)


def test_copies_read_all_sources_first_then_zeroes_apply(small):
    step, _ = small
    for part in step.cache_memory():
        for block in range(6):
            part[:, block] = block + 1
    step.change_blocks(((0, 1), (1, 2)), (4,))
    for part in step.cache_memory():
        assert [float(part[1, block].mean()) for block in range(6)] == [1, 1, 2, 4, 0, 6]
        assert (part[:, :3] == part[:, :3, :1]).all()


@pytest.mark.parametrize("isa", SETS)
def test_threads_enter_no_sum(isa):
    shape = shape_of()
    weights = random_weights(shape, biases=True, qk_norm=True)
    options = ({"num_threads": 1}, {"num_threads": 2, "pin_threads": True}, {"num_threads": 7})
    results = [make_step(shape, weights, isa, **option).forward(TOKENS, LAYOUT, LAST).logits for option in options]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def pool_threads(start):
    """What `start` returns, and the threads it started."""
    before = set(os.listdir("/proc/self/task"))
    started = start()
    return started, [int(task) for task in set(os.listdir("/proc/self/task")) - before]


@pytest.mark.parametrize("isa", SETS)
def test_a_unit_that_two_threads_compute_counts_once(isa):
    """Five threads on one core: the system takes each off it in the middle of units, and others take those over."""
    shape = shape_of(hidden_size=512, intermediate_size=1536, num_layers=4)
    weights = random_weights(shape, biases=True, qk_norm=True)
    expected = make_step(shape, weights, isa, num_threads=1).forward(TOKENS, LAYOUT, LAST).logits
    step, threads = pool_threads(lambda: make_step(shape, weights, isa, num_threads=5))
    for thread in threads:
        os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
    for _ in range(60):
        logits = step.forward(TOKENS, LAYOUT, LAST).logits
        np.testing.assert_array_equal(logits.view(np.uint32), expected.view(np.uint32))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only")
def test_threads_that_share_a_core_move_apart():
    shape, cores = shape_of(), os.sched_getaffinity(0)
    weights = random_weights(shape, biases=False, qk_norm=False)
    step, threads = pool_threads(lambda: make_step(shape, weights, SETS[0], num_threads=2))
    for thread in threads:
        os.sched_setaffinity(thread, {min(cores)})
    assert len(threads) == 2
    for _ in range(200):  # of so small a step one thread may do all before the other wakes
        step.forward(TOKENS, LAYOUT, LAST)
        if cores in [os.sched_getaffinity(thread) for thread in threads]:
            return  # the one that left took back the right to run on any core
    pytest.fail("both threads stayed on one core")


def test_a_profile_counts_the_phases_of_both_threads(small):
    step, _ = small
    cycles = step.profile()
    step.forward(TOKENS, LAYOUT, np.array([], np.int64))
    spent = dict(zip(Phase, cycles.sum(axis=0), strict=True))
    assert cycles.shape == (2, len(Phase))
    unused = (Phase.HEAD, Phase.ROUTE)  # no logits, no mixture
    assert [phase for phase in Phase if spent[phase] == 0] == sorted(unused)
    before = cycles.copy()
    step.forward(TOKENS, LAYOUT, LAST)
    assert (cycles >= before).all()
    assert cycles[:, Phase.HEAD].sum() > 0


def test_probes_tell_what_they_did(small):
    step, _ = small
    assert step.probe(Probe.MULTIPLY, 1000) == 1000 * step.probe(Probe.MULTIPLY, 1) > 2 * 1000 * 24 * 8
    once = step.probe(Probe.READ, 1)
    assert once > 99 * 40 * 2  # the head alone, in bfloat16
    assert step.probe(Probe.READ, 3) == 3 * once


@pytest.mark.parametrize("isa", SETS)
def test_models_step_side_by_side(isa):
    shape = shape_of()
    weights = random_weights(shape, biases=False, qk_norm=False)
    steps = [make_step(shape, weights, isa) for _ in range(3)]
    expected = steps[0].forward(TOKENS, LAYOUT, LAST).logits
    wrong = []

    def repeat(step):
        results = (step.forward(TOKENS, LAYOUT, LAST).logits for _ in range(50))
        wrong.extend(result for result in results if not np.array_equal(result, expected))

    threads = [threading.Thread(target=repeat, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


WRONG_STEPS = {
    "token_ids: 99 is outside 0..98": {"token_ids": np.array([5, 6, 7, 8, 99])},
    "token_ids: -1 is outside": {"token_ids": np.array([-1, 6, 7, 8, 9])},
    "token_ids: 0 tokens": {"token_ids": np.array([], np.int64)},
    "positions has shape": {"token_ids": TOKENS[:4]},
    "logit_tokens: 5 is outside 0..4": {"logit_tokens": np.array([5])},
    "slot_mapping: 640 is outside 0..639": {"slot_mapping": np.array([0, 1, 2, 3, 640])},
    "slot_mapping: -2 is outside 0..639": {"slot_mapping": np.array([0, 1, 2, 3, -2])},
    "floors has shape": {"floors": np.array([0], np.int32)},
    "floors: .*16.* are not the first of a block": {"floors": np.array([16, 0], np.int32)},
    "positions must be consecutive": {"positions": np.array([0, 1, 3, 3, 0])},
    "seq_lens: 401 is outside": {"seq_lens": np.array([4, 401], np.int32)},
    "query_start_loc must rise": {"query_start_loc": np.array([0, 5, 5], np.int32)},
    "do not fit 1 seq_lens": {"seq_lens": np.array([4], np.int32)},
    "block_tables: 40 is outside 0..39": {"block_tables": np.array([[3], [40]], np.int32)},
    "block_tables: 1 columns, a row needs 2": {
        "positions": np.array([13, 14, 15, 16, 0]),
        "seq_lens": np.array([17, 1], np.int32),
    },
}


@pytest.mark.parametrize("message", WRONG_STEPS)
def test_wrong_steps_are_refused_and_write_nothing(small, message):
    step, _ = small
    changes = dict(WRONG_STEPS[message])
    arguments = {name: changes.pop(name) for name in ("token_ids", "logit_tokens") if name in changes}
    with pytest.raises(ValueError, match=message):
        step.forward(
            arguments.get("token_ids", TOKENS), replace(LAYOUT, **changes), arguments.get("logit_tokens", LAST)
        )
    assert not any(part.any() for part in step.cache_memory())


def test_the_compiled_check_and_the_one_that_explains_agree(small):
    step, _ = small
    rng, refused = np.random.default_rng(4), 0
    for _ in range(300):
        arrays = {name: getattr(LAYOUT, name).copy() for name in ("positions", "slot_mapping", "query_start_loc")}
        arrays |= {"seq_lens": LAYOUT.seq_lens.copy(), "block_tables": LAYOUT.block_tables.copy()}
        arrays |= {"floors": np.zeros(2, np.int32)}
        tokens, last = TOKENS.copy(), LAST.copy()
        changeable = [tokens, last, *arrays.values()]
        for index in rng.choice(len(changeable), rng.integers(3), replace=False).tolist():
            array = changeable[index]
            array.flat[rng.integers(array.size)] += rng.choice([-1000, -4, -1, 1, 4, 1000])
        layout, cache = replace(LAYOUT, **arrays), step._allocated
        try:
            check_entries(step_arrays(tokens, layout, last), 99, cache)
        except ValueError as error:
            refused += 1
            with pytest.raises(ValueError, match=re.escape(str(error))):
                step.forward(tokens, layout, last)
        else:
            step.forward(tokens, layout, last)
    assert 100 < refused < 290


def test_wrong_use_is_refused(small):
    step, weights = small
    norm = torch.from_numpy(weights[TensorKind.MLP_NORM, 0])
    with pytest.raises(ValueError, match=r"MLP_NORM has shape \[39\], must be \[40\]"):
        step.set_tensor(TensorKind.MLP_NORM, 0, norm[1:])
    with pytest.raises(ValueError, match="layer 2 is outside"):
        step.set_tensor(TensorKind.MLP_NORM, 2, norm)
    with pytest.raises(ValueError, match="EMBEDDING of a tied model"):
        step.set_tensor(TensorKind.EMBEDDING, 0, torch.zeros(99, 40))
    with pytest.raises(ValueError, match="copies: 40 is outside"):
        step.change_blocks(((1, 40),), ())
    with pytest.raises(ValueError, match="zeroed: -1 is outside"):
        step.change_blocks((), (-1,))
    with pytest.raises(ValueError, match="allocated already"):
        step.allocate(num_blocks=1, block_size=1, max_tokens=1, max_positions=1)
    step.close()
    with pytest.raises(ValueError, match="closed"):
        step.forward(TOKENS, LAYOUT, LAST)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("num_heads 4 is no multiple", {"num_kv_heads": 3}),
        ("head_dim must be even", {"head_dim": 7}),
        ("vocab_size must be positive", {"vocab_size": 0}),
    ],
)
def test_impossible_shapes_are_refused(message, sizes, isa):
    with pytest.raises(ValueError, match=message):
        DecoderStep(shape_of(**sizes), torch.float32, InstructionSet[isa], 1)


@pytest.mark.parametrize("isa", SETS)
def test_other_arguments_are_refused(isa):
    with pytest.raises(ValueError, match="num_threads must be"):
        DecoderStep(shape_of(), torch.float32, InstructionSet[isa], 0)
    with pytest.raises(ValueError, match="dtype must be"):
        DecoderStep(shape_of(), torch.float16, InstructionSet[isa], 1)
    step = DecoderStep(shape_of(), torch.float32, InstructionSet[isa], 1)
    with pytest.raises(ValueError, match="allocate comes before"):
        step.forward(TOKENS, LAYOUT, LAST)
    with pytest.raises(ValueError, match="block_size must be positive"):
        step.allocate(num_blocks=1, block_size=0, max_tokens=1, max_positions=1)
    with pytest.raises(ValueError, match="max_tokens: 2097153 are too many for one step"):
        step.allocate(num_blocks=1, block_size=16, max_tokens=2**21 + 1, max_positions=1)
    with pytest.raises(MemoryError, match="steps of 1 tokens and a KV cache of 2147483647 blocks of 1024 tokens"):
        step.allocate(num_blocks=2**31 - 1, block_size=1024, max_tokens=1, max_positions=1)
