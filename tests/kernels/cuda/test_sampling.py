"""Sampling on the device's kernels: the reference's tokens, statuses, cells, penalties, log probabilities.

Rules I7, J1 to J4, J6, J7, J9, J10.
"""

import numpy as np
import pytest
import torch

from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.host.backend import HostBackend
from stepahead.kernels.cuda.inputs import Cells
from stepahead.kernels.cuda.sampling import (
    MAX_LISTED,
    Masks,
    PenaltyColumns,
    SamplingColumns,
    TokenCounts,
    add_bias,
    apply_penalties,
    count_history,
    count_tokens,
    keep_drawable,
    logprobs,
    mask_logits,
    sample,
)
from stepahead.kernels.reference.logprobs import token_logprob
from stepahead.kernels.reference.penalties import TokenRules, penalised, row_penalties
from stepahead.kernels.reference.philox import draw_uniform
from stepahead.kernels.reference.sampling import RowSampling, processed_log_weights, sample_row

OK, NON_FINITE, POSITION_MISMATCH, NOTHING_ALLOWED = 0, 1, 2, 3


def sampling_columns(rows, **columns):
    """Each column is one value or one per row."""

    def column(name, default, dtype):
        return torch.from_numpy(np.broadcast_to(np.asarray(columns.get(name, default), dtype), rows).copy())

    return SamplingColumns(
        temperature=column("temperature", 1.0, np.float32),
        top_p=column("top_p", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        min_p=column("min_p", 0.0, np.float32),
        seed=column("seed", 7, np.uint64).view(torch.int64),
        choice_index=column("choice_index", 0, np.int64),
        output_index=column("output_index", np.arange(rows), np.int64),
    )


def run_sample(logits, backend=None, row_status=None, cells=None, **columns):
    """Samples every row."""
    rows = len(logits)
    sampling = sampling_columns(rows, **columns)
    status = torch.zeros(rows, dtype=torch.uint8) if row_status is None else row_status
    cells = cells or Cells(torch.full((rows,), -9), torch.full((rows,), -1))
    places = (status, torch.arange(rows, dtype=torch.int32), torch.arange(rows) + 40)
    tokens, status = sample(backend or HostBackend(), torch.as_tensor(logits), places, sampling, cells)
    return tokens.numpy(), status.numpy(), cells


def reference_tokens(logits, **columns):
    rows = len(logits)
    values = {name: np.broadcast_to(value, rows) for name, value in columns.items()}
    seed = np.asarray(values.pop("seed", np.full(rows, 7)), np.uint64)
    choice = np.asarray(values.pop("choice_index", np.zeros(rows)), np.int64)
    draws = draw_uniform(seed, choice, np.asarray(values.pop("output_index", np.arange(rows)), np.int64))
    tokens = []
    for row in range(rows):
        parameters = {name: value[row].item() for name, value in values.items()}
        parameters.setdefault("temperature", 1.0)
        token, status = sample_row(logits[row], RowSampling(draw=float(draws[row]), **parameters))
        assert status == OK
        tokens.append(token)
    return tokens


def random_logits(rows, vocab, spread=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.4},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.01},
        {"top_p": 0.999, "temperature": 2.0},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 300, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [1, 3, 255, 257, 2500])
def test_tokens_are_the_references(vocab, columns):
    logits = random_logits(12, vocab)
    assert run_sample(logits, **columns)[0].tolist() == reference_tokens(logits, **columns)


@pytest.mark.parametrize(
    "columns", [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 7, "top_p": 0.6}, {"temperature": 0}], ids=str
)
def test_j9_ties_go_to_the_lowest_ids(columns):
    logits = np.random.default_rng(1).integers(-2, 1, (24, 600)).astype(np.float32)
    logits[:, ::7] = np.where(logits[:, ::7] == 0, -0.0, logits[:, ::7])  # equal to 0 for the reference
    assert run_sample(logits, **columns)[0].tolist() == reference_tokens(logits, **columns)


@pytest.mark.parametrize("top_digit", [3, 8])  # a lane of the selection looks at 8 digits
@pytest.mark.parametrize("shift", [0, 8, 16])
@pytest.mark.parametrize("top_k", [1, 5, 6, 12, 13])
def test_thresholds_between_neighbouring_digits_of_the_selection(shift, top_k, top_digit):
    """Values one digit apart at each round of eight bits; 5 of the largest, 7 of the next, and so on."""
    level = np.repeat(np.arange(4), [5, 7, 9, 20])
    bits = np.uint32(0x3F800000) + (np.uint32(top_digit) - level.astype(np.uint32) << np.uint32(shift))
    logits = np.tile(np.random.default_rng(6).permutation(bits).view(np.float32), (40, 1))
    for columns in ({"top_k": top_k}, {"top_p": top_k / 41}):
        assert run_sample(logits, **columns)[0].tolist() == reference_tokens(logits, **columns)


def test_many_rows_of_mixed_parameters():
    rows, random = 60, np.random.default_rng(3)
    columns = {
        "temperature": random.choice([0.0, 0.5, 1.0, 1.7], rows),
        "top_p": random.choice([1.0, 0.95, 0.5], rows),
        "top_k": random.choice([0, 1, 20, 5000], rows),
        "min_p": random.choice([0.0, 0.05], rows),
        "seed": random.integers(0, 2**64, rows, np.uint64),
        "choice_index": random.integers(0, 2**40, rows),
        "output_index": random.integers(0, 2**40, rows),
    }
    logits = random_logits(rows, 1000, seed=4)
    assert run_sample(logits, **columns)[0].tolist() == reference_tokens(logits, **columns)


def test_ok_rows_write_cells_and_others_write_nothing():
    logits = random_logits(4, 300)
    logits[1, 77] = np.nan
    row_status = torch.tensor([0, 0, POSITION_MISMATCH, 0], dtype=torch.uint8)
    tokens, status, cells = run_sample(logits, row_status=row_status, temperature=0.0)
    assert status.tolist() == [OK, NON_FINITE, POSITION_MISMATCH, OK]
    assert cells.tokens.tolist() == [tokens[0], -9, -9, tokens[3]]
    assert cells.positions.tolist() == [41, -1, -1, 44]


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ([1, np.nan, 2], NON_FINITE),
        ([1, -np.nan, 2], NON_FINITE),
        ([1, np.inf, 2], NON_FINITE),
        ([-np.inf, -np.inf, -np.inf], NON_FINITE),
        ([-np.inf, 0, -np.inf], OK),
    ],
)
def test_j10_a_row_that_is_not_finite_ends_alone(row, status):
    logits = np.array([row, [0, 1, 2]], np.float32)
    tokens, statuses, _ = run_sample(logits, top_p=0.9)
    assert statuses.tolist() == [status, OK]
    if status == OK:
        assert tokens[0] == 1


def test_j3_neighbours_do_not_change_a_row():
    logits = random_logits(6, 700)
    together = run_sample(logits, top_p=0.9, top_k=50)[0]
    alone = [run_sample(logits[i : i + 1], top_p=0.9, top_k=50, output_index=[i])[0][0] for i in range(6)]
    assert together.tolist() == alone


def packed_mask(allowed):
    words = np.zeros((allowed.shape[0], -(-allowed.shape[1] // 32) * 4), np.uint8)
    packed = np.packbits(allowed, axis=1, bitorder="little")
    words[:, : packed.shape[1]] = packed
    return torch.from_numpy(words.view(np.int32))


def test_i7_masks_and_suppressed_ids_as_the_reference_has_them():
    random, vocab = np.random.default_rng(5), 421
    logits = random_logits(7, vocab)
    allowed = random.random((3, vocab)) < 0.3
    allowed[2] = False
    index = [0, -1, 1, 2, 0, -1, 2]
    suppressed = [[], [3, 9], [int(i) for i in np.flatnonzero(allowed[1])], [], [5], list(range(vocab)), []]
    logits[4, 17] = np.nan
    logits[6] = -np.inf
    masks = Masks(
        words=packed_mask(allowed),
        index=torch.tensor(index, dtype=torch.int32),
        suppressed_ids=torch.tensor([token for ids in suppressed for token in ids], dtype=torch.int32),
        suppressed_start=torch.tensor(np.cumsum([0, *map(len, suppressed)]), dtype=torch.int32),
    )
    masked, row_status = torch.from_numpy(logits.copy()), torch.zeros(7, dtype=torch.uint8)
    mask_logits(HostBackend(), masked, masks, row_status)
    tokens, status, _ = run_sample(masked, row_status=row_status)
    draws = draw_uniform(np.full(7, 7, np.uint64), np.zeros(7, np.int64), np.arange(7))
    for row in range(7):
        bits = None if index[row] < 0 else np.packbits(allowed[index[row]], bitorder="little")
        parameters = RowSampling(
            temperature=1.0, draw=float(draws[row]), mask=bits, suppressed=np.array(suppressed[row], np.int64)
        )
        wanted, wanted_status = sample_row(logits[row], parameters)
        assert status[row] == wanted_status
        assert status[row] != OK or tokens[row] == wanted
    assert status.tolist() == [OK, OK, NOTHING_ALLOWED, NOTHING_ALLOWED, NON_FINITE, NOTHING_ALLOWED, NON_FINITE]


def token_counts(num_slots, vocab):
    words = torch.full((num_slots, -(-vocab // 32)), -1, dtype=torch.int32)
    return TokenCounts(torch.full((num_slots, vocab), 99, dtype=torch.int32), words)


def test_j1_j2_penalties_count_prompts_outputs_and_the_token_of_the_step_before():
    vocab, logits = 70, random_logits(2, 70)
    logits[0, 40] = -np.inf
    prompts, outputs = [[1, 1, 40, 69], []], [[2, 2, 40], [69]]
    counts = token_counts(3, vocab)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    for slot, prompt, output in zip(slots.tolist(), prompts, outputs, strict=True):
        count_history(HostBackend(), counts, slot, torch.tensor(prompt + output), len(prompt))
    # A step samples; the second row failed and its id must count nowhere.
    count_tokens(
        HostBackend(), counts, slots, torch.tensor([2, 5]), torch.tensor([OK, NON_FINITE], dtype=torch.uint8)
    )
    outputs[0].append(2)
    columns = PenaltyColumns(
        repetition=torch.tensor([1.3, 0.8]), frequency=torch.tensor([0.5, -0.25]), presence=torch.tensor([0.2, 1.0])
    )
    result = torch.from_numpy(logits.copy())
    apply_penalties(HostBackend(), result, slots, counts, columns)
    for row, (repetition, frequency, presence) in enumerate([(1.3, 0.5, 0.2), (0.8, -0.25, 1.0)]):
        rules = TokenRules(
            repetition_penalty=float(np.float32(repetition)),
            frequency_penalty=frequency,
            presence_penalty=float(np.float32(presence)),
        )
        history = row_penalties(rules, prompts[row] + outputs[row], len(prompts[row]))
        assert np.array_equal(result[row].numpy(), penalised(logits[row], history))
    assert counts.outputs[1].eq(99).all()  # another slot's counts are nobody's business


def test_rows_without_a_slot_are_left_alone():
    logits = torch.from_numpy(random_logits(2, 50))
    before, counts = logits.clone(), token_counts(1, 50)
    nobody, one = torch.tensor([-1, -1], dtype=torch.int32), torch.ones(2)
    strong = PenaltyColumns(repetition=one * 5, frequency=one, presence=one)
    apply_penalties(HostBackend(), logits, nobody, counts, strong)
    count_tokens(HostBackend(), counts, nobody, torch.tensor([3, 4]), torch.zeros(2, dtype=torch.uint8))
    assert torch.equal(logits, before)
    assert counts.outputs.eq(99).all()


def test_neutral_penalties_change_nothing():
    logits = torch.from_numpy(random_logits(1, 50))
    before = logits.clone()
    neutral = PenaltyColumns(repetition=torch.ones(1), frequency=torch.zeros(1), presence=torch.zeros(1))
    apply_penalties(HostBackend(), logits, torch.zeros(1, dtype=torch.int32), token_counts(1, 50), neutral)
    assert torch.equal(logits, before)


def test_bias_is_added_where_it_is_named_and_held_within_bounds():
    logits = random_logits(2, 40)
    logits[1, 7] = -np.inf
    biases = {0: {3: 1.5, 9: 3e38}, 1: {3: -2.0, 39: 100.0, 7: 5.0}}
    entries = [(row, token, value) for row, named in biases.items() for token, value in named.items()]
    rows, ids, values = zip(*entries, strict=True)
    result = torch.from_numpy(logits.copy())
    tensors = (torch.tensor(rows, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32), torch.tensor(values))
    add_bias(HostBackend(), result, tensors)
    for row, named in biases.items():
        rules = TokenRules(bias_ids=np.array([*named]), biases=np.array([*named.values()], np.float32))
        assert np.array_equal(result[row].numpy(), penalised(logits[row], row_penalties(rules, [], 0)))


def test_penalties_hide_no_row_that_is_not_finite():
    logits = torch.tensor([[np.nan, np.inf, -np.inf, 1.0]])
    counts = TokenCounts(torch.ones(1, 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))
    columns = PenaltyColumns(repetition=torch.full((1,), 2.0), frequency=torch.ones(1), presence=torch.ones(1))
    apply_penalties(HostBackend(), logits, torch.zeros(1, dtype=torch.int32), counts, columns)
    assert torch.isnan(logits[0, 0])
    assert logits[0, 1:].tolist() == [np.inf, -np.inf, -1.5]


@pytest.mark.parametrize(
    "columns",
    [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8, "temperature": 0.6}],
    ids=str,
)
def test_j7_what_a_row_was_drawn_from(columns):
    logits = random_logits(5, 700)
    logits[1] = np.round(logits[1])  # ties
    logits[2, ::3] = -np.inf
    temperature = np.array([columns.get("temperature", 1.0)] * 3 + [0.0, 1.0])
    found = torch.from_numpy(logits.copy())
    sampling = sampling_columns(5, **{**columns, "temperature": temperature})
    status, selected = (torch.tensor(flags, dtype=torch.uint8) for flags in ([0, 0, 0, 0, 3], [1, 1, 1, 1, 1]))
    keep_drawable(HostBackend(), found, status, selected, sampling)
    for row in range(4):
        wanted = processed_log_weights(logits[row], RowSampling(**{**columns, "temperature": temperature[row]}))
        assert np.array_equal(found[row].numpy(), wanted)
    assert np.array_equal(found[4].numpy(), logits[4])
    keep_drawable(HostBackend(), unselected := torch.from_numpy(logits.copy()), status, 1 - selected, sampling)
    assert np.array_equal(unselected.numpy(), logits)


@pytest.mark.parametrize("vocab", [1, 5, 20, 300, 1500])
def test_j7_log_probabilities_ranks_and_lists(vocab):
    logits = random_logits(4, vocab)
    logits[1] = np.round(logits[1])  # ties
    logits[2, : vocab // 2] = -np.inf
    tokens = np.array([0, vocab - 1, vocab // 2, vocab - 1])
    num_wanted = np.array([0, 20, 5, 1], np.int32)
    status = torch.tensor([OK, OK, OK, NON_FINITE], dtype=torch.uint8)
    result = logprobs(
        HostBackend(), torch.from_numpy(logits), torch.from_numpy(tokens), status, torch.from_numpy(num_wanted)
    )
    for row in range(3):
        wanted = token_logprob(logits[row], int(tokens[row]), int(num_wanted[row]))
        assert abs(result.token_logprobs[row].item() - wanted.value) < 1e-5
        assert result.ranks[row].item() == wanted.rank
        listed = result.num_listed[row].item()
        assert result.listed_ids[row, :listed].tolist() == wanted.top_ids.tolist()
        assert np.allclose(result.listed_logprobs[row, :listed], wanted.top_values, atol=1e-5)
    assert torch.isnan(result.token_logprobs[3])  # allocated as NaN, never written


@pytest.mark.parametrize("row", [[1, np.nan, 2], [1, np.inf, 2], [-np.inf] * 3, [-np.inf, 0, -np.inf]])
def test_j7_values_stay_finite_where_there_is_no_distribution(row):
    logits = np.array([row], np.float32)
    wanted = token_logprob(logits[0], 0, 3)
    status, three = torch.zeros(1, dtype=torch.uint8), torch.full((1,), 3, dtype=torch.int32)
    result = logprobs(HostBackend(), torch.from_numpy(logits), torch.zeros(1, dtype=torch.int64), status, three)
    found = (result.token_logprobs.item(), result.ranks.item(), result.num_listed.item())
    assert found == (wanted.value, wanted.rank, len(wanted.top_ids))


def test_the_list_has_the_length_the_kernel_has():
    assert logprobs(
        HostBackend(), torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.int32),
    ).listed_ids.shape == (0, MAX_LISTED)  # fmt: skip


def test_logits_of_another_type_are_refused():
    with pytest.raises(KernelArgumentError, match=r"logits is torch\.float16"):
        run_sample(torch.zeros(1, 5, dtype=torch.float16))
