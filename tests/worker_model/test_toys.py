"""Toy models: golden sequences of the lessons, and caches that show when they are misused."""

import io
import json
import time
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from stepahead.worker.errors import OptionRefused
from stepahead.worker.model.registry import make_runner
from stepahead.worker.runner import NO_POSITION, SampleStatus
from stepahead.worker.toy.paged_integers import POISON
from tests.worker_model.driver import Driver, columns

ALL = ["toy:score-table", "toy:running-sum", "toy:window-sum", "toy:tagged?vocab=97", "toy:sleep?ms=0&vocab=50"]


def drive(spec, **options):
    return Driver(make_runner(spec), **options)


@pytest.mark.parametrize("chunk", [1, 2, 9])
@pytest.mark.parametrize(
    ("spec", "prompt", "expected"),
    [
        ("toy:score-table", [0], [1, 2, 3, 4]),
        ("toy:score-table?loop=steps", [0], [1, 2, 2, 2, 2]),
        ("toy:running-sum", [1, 2, 3, 5], [1, 2, 4]),
        ("toy:window-sum", [1, 2, 3, 5], [0, 8, 3, 1, 2]),
        ("toy:window-sum?width=4", [7, 9], [6, 2, 4, 1, 3]),
        ("toy:window-sum?width=1", [3, 4], [4, 4]),
    ],
)
def test_golden_sequences(spec, prompt, expected, chunk):
    driver = drive(spec, block_size=2)
    assert driver.run([driver.admit(prompt)], len(expected), chunk=chunk) == [expected]


def test_score_table_speaks():
    facts = make_runner("toy:score-table").load(lambda *call: None)
    assert (facts.eos_token_ids, facts.bos_token_id, facts.vocab_size) == ((4,), 0, 5)
    archive = zipfile.ZipFile(io.BytesIO(facts.tokenizer_bundle))
    tokenizer = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
    assert tokenizer.decode([0, 1, 2, 3, 4]) == "Small steps help"
    assert tokenizer.encode("Small steps").ids == [0, 1, 2]
    assert tokenizer.encode("Small steps", add_special_tokens=False).ids == [1, 2]
    fields = json.loads(archive.read("bundle.json"))
    assert (fields["eos_token"], fields["eos_token_ids"], fields["add_bos_token"]) == ("<end>", [4], True)
    assert fields["generation_defaults"] == {"temperature": 0.0}


def test_tagged_is_stable():
    driver = drive("toy:tagged?vocab=97")
    assert driver.run([driver.admit([1, 2, 3])], 5) == [[12, 91, 54, 5, 16]]


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_j3_d4_tokens_do_not_depend_on_batch_or_chunks(spec, temperature):
    prompts = [[1, 2, 3], [0], [4, 4, 2, 1, 3, 0, 2], [3, 1]]
    sampling = {"temperature": temperature, "seed": 5}
    alone = []
    for prompt in prompts:
        driver = drive(spec)
        alone += driver.run([driver.admit(prompt, **sampling)], 9)
    driver = drive(spec, num_blocks=160, seed=8)
    together = driver.run([driver.admit(prompt, **sampling) for prompt in prompts], 9, chunk=2)
    assert together == alone


def test_j4_tagged_mixes_the_draw_in():
    driver = drive("toy:tagged", num_blocks=160)
    seqs = [driver.admit([1], temperature=1.0, seed=s, choice_index=c) for s, c in ((1, 0), (2, 0), (1, 1), (1, 0))]
    outputs = driver.run(seqs, 8)
    assert outputs[0] == outputs[3]
    assert len({tuple(tokens) for tokens in outputs}) == 3


@pytest.mark.parametrize("damage", ["foreign", "swapped", "stale"])
def test_tagged_tokens_change_when_blocks_do(damage):
    prompt = list(range(10, 22))
    clean = drive("toy:tagged")
    expected = clean.run([clean.admit(prompt)], 3)[0]
    driver = drive("toy:tagged")
    seq, other = driver.admit(prompt), driver.admit(prompt[::-1])
    driver.step([(seq, 11), (other, 12)])
    if damage == "foreign":
        seq.blocks[1] = other.blocks[1]
    elif damage == "swapped":
        seq.blocks[:2] = seq.blocks[1::-1]
    else:
        driver.runner._cache.write(np.array([seq.blocks[0] * 4]), np.array([12345]))
    driver.step([(seq, 1)])
    assert seq.outputs != expected[:1]


@pytest.mark.parametrize("spec", ["toy:tagged", "toy:running-sum", "toy:window-sum?width=8"])
def test_missing_block_is_visible(spec):
    driver = drive(spec)
    seq = driver.admit([1, 2, 3, 4, 5, 6])
    seq.num_fed = 4  # claims a settled prefix that nobody wrote
    assert driver.step([(seq, 2)]) == [SampleStatus.NON_FINITE]


def test_first_write_to_a_block_poisons_its_rest():
    driver = drive("toy:window-sum")
    first = driver.admit([1, 2, 3, 4], num_tokens=4)
    driver.step([(first, 4)])
    driver.release(first)
    second = driver.admit([7], num_tokens=4)
    assert second.blocks == first.blocks
    driver.step([(second, 1)])
    assert driver.runner._cache._values[second.blocks[0]].tolist() == [7, POISON, POISON, POISON]


@pytest.mark.parametrize("spec", ALL)
def test_copies_and_zeroes(spec):
    driver = drive(spec)
    seq = driver.admit([1, 2, 3, 0, 2])
    driver.step([(seq, 5)])
    values = driver.runner._cache._values
    free = driver.free_blocks
    before = values[seq.blocks[1]].copy()
    driver.step([(seq, 1)], copies=((seq.blocks[1], free[0]), (free[0], free[1])), zeroed_blocks=(free[2],))
    assert values[free[0]].tolist() == before.tolist()
    assert values[free[1]].tolist() == [POISON] * 4
    assert values[free[2]].tolist() == [0] * 4


@pytest.mark.parametrize("spec", ALL)
def test_restrictions_apply(spec):
    driver = drive(spec)
    vocab_size = driver.facts.vocab_size
    bits = np.zeros(vocab_size, np.uint8)
    bits[[1, 3]] = 1
    mask = np.packbits(bits, bitorder="little")
    seq = driver.admit([0], mask=mask, suppressed=np.array([1]))
    assert driver.run([seq], 3) == [[3, 3, 3]]
    none = driver.admit([0], mask=mask, suppressed=np.array([1, 3]))
    assert driver.step([(none, 1)]) == [SampleStatus.NOTHING_ALLOWED]


def test_sleep_takes_its_time():
    driver = drive("toy:sleep?ms=4")
    seq = driver.admit([1])
    batch = driver.batch([(seq, 1)])
    before = time.perf_counter_ns()
    driver.runner.forward(batch)
    assert time.perf_counter_ns() - before >= 4_000_000  # a lower bound: no load can break it


@pytest.mark.parametrize("spec", [*ALL, "tiny"])
class TestCells:
    """C1, C4, C5 and design 4.3: holes, invalidation, rows that sample nothing."""

    @pytest.fixture
    def driver(self, spec, tiny):
        if spec == "tiny":
            return Driver(make_runner(str(tiny("llama-mha").path), dtype="float32", threads=1))
        return drive(spec)

    def test_hole_writes_and_samples_nothing(self, driver):
        twin, seq = driver.admit([1, 2, 3], num_tokens=20), driver.admit([1, 2, 3], num_tokens=20)
        driver.step([(seq, 3), (twin, 3)])
        cells = driver.runner._cells
        held = int(cells.token_ids[seq.slot]), int(cells.positions[seq.slot])
        before = cached(driver, seq)
        batch = driver.batch([(seq, 1), (twin, 1)], positions={0: 7})
        driver.runner.forward(batch)
        assert (cached(driver, seq) == before).all()
        samples = driver.runner.sample(batch)
        assert samples.status.tolist() == [SampleStatus.POSITION_MISMATCH, SampleStatus.OK]
        assert (int(cells.token_ids[seq.slot]), int(cells.positions[seq.slot])) == held
        twin.outputs.append(int(samples.token_ids[1]))
        twin.num_fed += 1
        driver.run([seq, twin], 6)
        assert seq.outputs == twin.outputs

    def test_step_of_holes_only(self, driver):
        seq = driver.admit([1, 2, 3])
        driver.step([(seq, 3)])
        batch = driver.batch([(seq, 1)], positions={0: 9})
        driver.runner.forward(batch)
        assert driver.runner.sample(batch).status.tolist() == [SampleStatus.POSITION_MISMATCH]

    def test_b6_invalidated_and_reset_cells_are_holes(self, driver):
        seq = driver.admit([1, 2, 3], num_tokens=20)
        driver.step([(seq, 3)])
        driver.new_slots = [seq.slot]
        assert driver.step([(seq, 1)]) == [SampleStatus.POSITION_MISMATCH]
        seq = driver.admit([1, 2, 3], num_tokens=20)
        driver.step([(seq, 3)])
        driver.runner.reset()
        assert (driver.runner._cells.positions == NO_POSITION).all()
        assert driver.step([(seq, 1)]) == [SampleStatus.POSITION_MISMATCH]

    def test_c4_middle_chunk_leaves_the_cell(self, driver):
        seq = driver.admit([1, 2, 3, 4, 0])
        driver.step([(seq, 3)])
        assert driver.runner._cells.positions[seq.slot] == NO_POSITION
        driver.step([(seq, 2)])
        assert driver.runner._cells.positions[seq.slot] == 5

    def test_failed_row_leaves_its_cell_and_the_next_is_a_hole(self, driver):
        none = np.zeros(-(-driver.facts.vocab_size // 8), np.uint8)
        seq = driver.admit([1, 2], mask=none)
        assert driver.step([(seq, 2)]) == [SampleStatus.NOTHING_ALLOWED]
        assert driver.step([(seq, 1)]) == [SampleStatus.POSITION_MISMATCH]

    def test_rows_left_out_of_sample_are_skipped(self, driver):
        skipped, kept = driver.admit([1, 2], num_tokens=20), driver.admit([1, 2, 3], num_tokens=20)
        batch = driver.batch([(skipped, 2), (kept, 3)])
        driver.runner.forward(batch)
        part = replace(batch, sample_rows=batch.sample_rows[1:], sampling=columns([kept]))
        samples = driver.runner.sample(part)
        assert samples.status.tolist() == [SampleStatus.OK]
        twin = driver.admit([1, 2, 3], num_tokens=20)
        driver.step([(twin, 3)])
        assert twin.outputs == samples.token_ids.tolist()
        assert driver.runner._cells.positions[skipped.slot] == NO_POSITION


def cached(driver, seq):
    """A copy of everything in the sequence's blocks."""
    if hasattr(driver.runner, "_cache"):
        return driver.runner._cache._values[seq.blocks]
    return np.stack([part[:, seq.blocks] for part in driver.runner._model[1].step.cache_memory()])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("toy:nothing", "score-table"),
        ("toy:tagged?vocab=0", "vocab must be an integer of at least 1"),
        ("toy:tagged?vocab=x", "vocab"),
        ("toy:tagged?eos=257", "eos must be token ids below 257"),
        ("toy:tagged?colour=red", "unknown option colour; tagged knows vocab, eos, context"),
        ("toy:tagged?vocab=5&vocab=6", "twice"),
        ("toy:tagged?vocab", "key=value"),
        ("toy:sleep?ms=-1", "ms"),
        ("toy:sleep?ms=nan", "ms"),
        ("toy:score-table?loop=nobody", "loop must be one of"),
        ("toy:running-sum?vocab=9", "at least 10"),
    ],
)
def test_bad_specifications_are_named(spec, message):
    with pytest.raises(OptionRefused, match=message):
        make_runner(spec)


def test_options_apply():
    facts = make_runner("toy:tagged?vocab=97&eos=3,5&context=64").load(lambda *call: None)
    assert (facts.vocab_size, facts.eos_token_ids, facts.max_context_tokens) == (97, (3, 5), 64)
    assert facts.fingerprint != make_runner("toy:tagged?vocab=97").load(lambda *call: None).fingerprint
