"""Steps that follow each other inside the step library give what steps called one by one give."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch

from stepahead.kernels.cpu.step.library import TensorKind
from stepahead.kernels.cpu.step.step_chain import Cells, SlotColumns
from stepahead.kernels.cpu.step.step_inputs import LAST_SAMPLE
from tests.kernels.step_model import available_sets, layout_of, make_step, random_weights, shape_of

SETS = available_sets()
BLOCKS = [list(range(first, first + 6)) for first in (0, 6, 12, 18)]
SLOTS = [5, 0, 7, 2]
"""Of the rows, among eight."""
PROMPTS = [[4, 8, 15], [16], [23, 42, 3, 14, 15, 9, 2], [6, 5]]


@pytest.fixture(params=[(isa, threads) for isa in SETS for threads in (1, 3)])
def options(request):
    isa, threads = request.param
    return {"isa": isa, "num_threads": threads, "dtype": torch.bfloat16}


def make(options, head=None):
    shape = shape_of()
    weights = random_weights(shape, biases=False, qk_norm=False)
    if head is not None:
        weights[TensorKind.HEAD, 0] = head(weights[TensorKind.HEAD, 0])
    return make_step(shape, weights, **options)


def new_cells():
    return Cells(np.zeros(8, np.int64), np.full(8, -1, np.int64))


def columns_of(rows, sample_rows, emptied=()):
    return SlotColumns(
        np.array([SLOTS[row] for row in rows], np.int32),
        np.array(sample_rows, np.int32),
        np.array(emptied, np.int32),
    )


def plan(chain, rows, starts, tokens, *, logits=None, emptied=()):
    """A step of some rows, all of which sample."""
    layout = layout_of(
        [(start, len(fed)) for start, fed in zip(starts, tokens, strict=True)], [BLOCKS[row] for row in rows]
    )
    last = layout.query_start_loc[1:].astype(np.int64) - 1
    ids = np.array([token for fed in tokens for token in fed], np.int64)
    return chain.plan(ids, layout, last, columns_of(rows, range(len(rows)), emptied), logits=logits)


def one_by_one(step, num_steps):
    """[num_steps + 1, rows] greedy tokens after the prompts, and their logits."""
    tokens, starts = PROMPTS, [0] * 4
    ids, best = [], []
    for _ in range(num_steps + 1):
        layout = layout_of([(at, len(fed)) for at, fed in zip(starts, tokens, strict=True)], BLOCKS)
        fed = np.array([token for row in tokens for token in row], np.int64)
        outputs = step.forward(fed, layout, layout.query_start_loc[1:].astype(np.int64) - 1)
        ids.append(outputs.best_ids)
        best.append(outputs.best_logits)
        starts = [at + len(row) for at, row in zip(starts, tokens, strict=True)]
        tokens = [[int(token)] for token in outputs.best_ids]
    return np.stack(ids), np.stack(best)


def decode_plans(chain, num_steps, *, ends=None):
    """The prompts' step and `num_steps` decode steps behind it."""
    starts = [len(prompt) for prompt in PROMPTS]
    yield plan(chain, range(4), [0] * 4, PROMPTS)
    for index in range(num_steps):
        at = [start + index for start in starts]
        if ends is not None and index == ends:
            at = [at[0] + 1, *at[1:]]
        yield plan(chain, range(4), at, [[LAST_SAMPLE]] * 4)


def test_a_chain_samples_what_single_steps_sample(options):
    expected_ids, expected_logits = one_by_one(make(options), 40)
    chain, cells = make(options), new_cells()
    chain = chain.chain(cells)
    ids, logits, planned = [], [], list(decode_plans(chain, 40))
    followed = 0
    assert chain.start(planned[0])
    attached = True
    for index, each in enumerate(planned):
        if not attached:
            assert chain.start(each)
        attached = index < 40 and chain.follow(each, planned[index + 1])
        followed += attached
        assert chain.wait(each)
        ids.append(each.outputs.best_ids)
        logits.append(each.outputs.best_logits)
        assert each.outputs.logits.size == 0
    np.testing.assert_array_equal(np.stack(ids), expected_ids)
    np.testing.assert_array_equal(np.stack(logits), expected_logits)
    np.testing.assert_array_equal(cells.token_ids[SLOTS], expected_ids[-1])
    np.testing.assert_array_equal(cells.positions[SLOTS], [len(prompt) + 40 for prompt in PROMPTS])


def test_steps_may_be_attached_far_ahead(options):
    expected_ids, _ = one_by_one(make(options), 12)
    step = make(options)
    chain = step.chain(new_cells())
    planned = list(decode_plans(chain, 12))
    logits = np.zeros((4, 99), np.float32)
    last = plan(chain, range(4), [len(prompt) + 12 for prompt in PROMPTS], [[LAST_SAMPLE]] * 4, logits=logits)
    assert chain.start(planned[0])
    attached = [chain.follow(before, after) for before, after in zip(planned, [*planned[1:], last], strict=True)]
    # The first may have ended before anybody could attach to it; what does not run takes more.
    for index, each in enumerate([*planned, last]):
        if index and not attached[index - 1]:
            assert chain.start(each)
        assert chain.wait(each)
    np.testing.assert_array_equal(np.stack([each.outputs.best_ids for each in planned]), expected_ids)
    np.testing.assert_array_equal(last.outputs.best_ids, last.outputs.logits.argmax(axis=1))
    assert last.outputs.logits is logits
    times = [time_ns for each in planned for time_ns in (each.started_ns, each.ended_ns)]
    assert times == sorted(times)


def test_a_step_whose_cell_is_elsewhere_never_runs(options):
    chain = make(options).chain(new_cells())
    planned = list(decode_plans(chain, 4, ends=2))
    assert chain.start(planned[0])
    chain.wait(planned[0])
    assert chain.start(planned[1])
    attached = [chain.follow(before, after) for before, after in itertools.pairwise(planned[1:])]
    assert chain.wait(planned[1])
    if attached[0]:
        assert chain.wait(planned[2])
        assert [chain.wait(each) for each, held in zip(planned[3:], attached[1:], strict=True) if held] == [
            False for held in attached[1:] if held
        ]
    else:
        assert chain.start(planned[2])
        assert chain.wait(planned[2])
    assert not chain.start(plan(chain, [0], [30], [[LAST_SAMPLE]]))
    assert chain.start(plan(chain, [0], [0], [[1, 2]]))


def test_an_emptied_slot_feeds_nothing(options):
    cells = new_cells()
    chain = make(options).chain(cells)
    first = plan(chain, [0, 1], [0, 0], [[7], [8]])
    assert chain.start(first)
    chain.wait(first)
    assert not chain.start(plan(chain, [1], [1], [[LAST_SAMPLE]], emptied=[SLOTS[1]]))
    assert cells.positions[[SLOTS[0], SLOTS[1]]].tolist() == [1, -1]
    assert chain.start(plan(chain, [0], [1], [[LAST_SAMPLE]]))


def test_j10_a_row_without_finite_logits_leaves_its_cell(options):
    def spoil(head):
        head = head.copy()
        head[50] = np.nan
        return head

    cells = new_cells()
    chain = make(options, spoil).chain(cells)
    first = plan(chain, [0], [0], [[7]])
    assert chain.start(first)
    assert chain.wait(first)
    assert np.isnan(first.outputs.best_logits).all()
    assert cells.positions[SLOTS[0]] == -1
    assert not chain.start(plan(chain, [0], [1], [[LAST_SAMPLE]]))


def test_nothing_follows_a_step_whose_samples_the_library_does_not_know(options):
    chain = make(options).chain(new_cells())
    first = plan(chain, [0], [0], [list(range(1, 80))], logits=np.zeros((1, 99), np.float32))
    behind = plan(chain, [1], [0], [[3]])
    assert not first.greedy
    assert chain.start(first)
    assert not chain.follow(first, behind)
    assert chain.wait(first)
    assert chain.start(behind)
    assert chain.wait(behind)
    assert not chain.follow(first, plan(chain, [2], [0], [[3]]))


def test_single_steps_and_chains_take_turns(options):
    step = make(options)
    chain = step.chain(new_cells())
    layout, token = layout_of([(0, 1)], [[20]]), np.array([3])
    expected = step.forward(token, layout, np.array([0])).logits
    for _ in range(20):
        first = plan(chain, [0], [0], [[7, 9]])
        second = plan(chain, [0], [2], [[LAST_SAMPLE]])
        assert chain.start(first)
        attached = chain.follow(first, second)
        assert chain.wait(second if attached else first)
        np.testing.assert_array_equal(step.forward(token, layout, np.array([0])).logits, expected)


def test_two_threads_drive_a_chain_for_long(options):
    """One plans and attaches, one waits, as in the worker; no step is forgotten, and none is kept for long."""
    expected_ids, _ = one_by_one(make(options), 80)
    chain = make(options).chain(new_cells())
    handed, results, most_kept = [], [], 0
    ready = threading.Semaphore(0)

    def device():
        for index in range(81):
            ready.acquire()
            each, attached = handed[index]
            assert attached or chain.start(each)
            assert chain.wait(each)
            results.append(each.outputs.best_ids)

    thread = threading.Thread(target=device)
    thread.start()
    before = None
    for index, each in enumerate(decode_plans(chain, 80)):
        while index - len(results) > 1:  # one step ahead
            time.sleep(0)
        handed.append((each, before is not None and chain.follow(before, each)))
        before = each
        ready.release()
        most_kept = max(most_kept, len(chain._kept))
    thread.join(60)
    np.testing.assert_array_equal(np.stack(results), expected_ids)
    assert most_kept < 12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": np.array([8], np.int32)}, "slots: an entry is outside 0..7"),
        ({"slots": np.array([0, 1], np.int32)}, "slots must be int32 [1]"),
        ({"sample_rows": np.array([1], np.int32)}, "sample_rows: an entry is outside 0..0"),
        ({"emptied_slots": np.array([-1], np.int32)}, "emptied_slots: an entry is outside 0..7"),
        ({"emptied_slots": np.array([1], np.int64)}, "emptied_slots must be int32"),
    ],
)
def test_a_wrong_plan_is_refused(change, says):
    if not SETS:
        pytest.skip("nothing can be compiled here")
    chain = make({"isa": SETS[0]}).chain(new_cells())
    fields = {
        "slots": np.array([0], np.int32),
        "sample_rows": np.array([0], np.int32),
        "emptied_slots": np.zeros(0, np.int32),
    }
    layout = layout_of([(0, 1)], [[3]])
    with pytest.raises(ValueError, match="token_ids: -2 is outside"):
        chain.plan(np.array([-2]), layout, np.array([0]), SlotColumns(**fields), logits=None)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is looked at
        chain.plan(np.array([1]), layout, np.array([0]), SlotColumns(**{**fields, **change}), logits=None)
    assert says in str(caught.value)


def test_cells_must_be_whole_numbers():
    if not SETS:
        pytest.skip("nothing can be compiled here")
    step = make({"isa": SETS[0]})
    with pytest.raises(ValueError, match="token_ids must be int64"):
        step.chain(Cells(np.zeros(8, np.int32), np.zeros(8, np.int64)))


def test_a_closed_model_is_named_and_not_touched():
    if not SETS:
        pytest.skip("nothing can be compiled here")
    step = make({"isa": SETS[0]})
    chain = step.chain(new_cells())
    first, second = plan(chain, [0], [0], [[7]]), plan(chain, [0], [1], [[LAST_SAMPLE]])
    assert chain.start(first)
    step.close()  # what was started has ended then
    assert chain.wait(first)
    for use in (
        lambda: plan(chain, [0], [0], [[7]]),
        lambda: chain.start(second),
        lambda: chain.follow(first, second),
    ):
        with pytest.raises(ValueError, match="the step is closed"):
            use()
