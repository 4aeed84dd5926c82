"""Steps announced ahead begin by themselves and sample what steps run one by one sample."""

import dataclasses
import itertools
import queue

import numpy as np
import pytest

from stepahead.worker.device_stream import CpuStream
from stepahead.worker.model.chained_steps import is_greedy
from stepahead.worker.model.registry import make_runner
from stepahead.worker.runner import NO_LOGPROBS, AskedLogprobs, PlansAhead, SampleStatus
from stepahead.worker.step import Step
from stepahead.worker.step_device import StepDevice
from tests.kernels.step_model import available_sets
from tests.worker_model.conftest import VOCAB_SIZE
from tests.worker_model.driver import Driver, columns

pytestmark = pytest.mark.skipif(not available_sets(), reason="the step library cannot be built here")
NUM_OUTPUTS = 12
PROMPTS = [np.random.default_rng(seed).integers(3, VOCAB_SIZE, size).tolist() for seed, size in ((1, 9), (2, 40))]


def new_driver(tiny):
    runner = make_runner(str(tiny("llama-gqa-tied").path), dtype="float32", threads=2, kernels="native")
    return Driver(runner)


def batches(driver, *, sampling=({}, {}), lose=None):
    """The prompts, then one token of each a step; `lose`: at that step the first row is a position too far."""
    seqs = [driver.admit(prompt, **options) for prompt, options in zip(PROMPTS, sampling, strict=True)]
    for index in range(NUM_OUTPUTS):
        rows = [(seq, 1 if seq.decoding else len(seq.prompt)) for seq in seqs]
        yield driver.batch(rows, positions={0: seqs[0].num_fed + 1} if index == lose else None)
        for seq, count in rows:
            seq.num_fed += count
            seq.outputs.append(-1)  # it counts draws


def one_by_one(runner, made):
    samples = []
    for batch in made:
        runner.forward(batch)
        samples.append(runner.sample(batch))
    return samples


class Bench:
    """A device, and the host thread's side of it."""

    def __init__(self, runner, **options):
        self.errors, self.ended = [], queue.SimpleQueue()
        self.stream = CpuStream(self.errors.append)
        self.device = StepDevice(runner, self.stream, **options)
        self.stream.start()

    def launch(self, batch, epoch=1):
        step = Step(
            step_id=batch.step_id, worker_epoch=epoch, in_place=False, batch=batch, rows=None, gate=None,
            gate_wait_ns=0, max_step_ns=10**12, read_ns=0,
        )  # fmt: skip
        self.device.launch_forward(step, batch, None)
        self.device.launch_sample(step, batch, lambda: self.ended.put(step))
        return step

    def run(self, made, ahead=1):
        """All steps in order, at most `ahead` beside the one that runs."""
        steps, num_ended = [], 0
        for batch in made:
            steps.append(self.launch(batch))
            while len(steps) - num_ended > ahead:
                self.wait()
                num_ended += 1
        for _ in range(len(steps) - num_ended):
            self.wait()
        return steps

    def wait(self):
        step = self.ended.get(timeout=30)
        assert not self.errors
        return step

    def close(self):
        assert self.stream.close(30)


def equal(steps, expected):
    for step, samples in zip(steps, expected, strict=True):
        np.testing.assert_array_equal(step.samples.status, samples.status)
        good = samples.status == SampleStatus.OK
        np.testing.assert_array_equal(step.samples.token_ids[good], samples.token_ids[good])


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(
    "sampling", [({}, {}), ({"temperature": 0.9, "seed": 3}, {})], ids=["greedy", "one row is drawn"]
)
def test_announced_steps_sample_the_same(tiny, sampling, ahead):
    reference, driver = new_driver(tiny), new_driver(tiny)
    expected = one_by_one(reference.runner, batches(reference, sampling=sampling))
    assert isinstance(driver.runner, PlansAhead)
    bench = Bench(driver.runner)
    steps = bench.run(batches(driver, sampling=sampling), ahead)
    bench.close()
    equal(steps, expected)
    assert all((samples.status == SampleStatus.OK).all() for samples in expected)


def test_the_clock_of_announced_steps_is_the_devices(tiny):
    driver = new_driver(tiny)
    bench = Bench(driver.runner)
    steps = bench.run(batches(driver))
    bench.close()
    times = [
        time_ns
        for step in steps
        for time_ns in (step.started_ns, step.forward_ended_ns, step.sample_started_ns, step.ended_ns)
    ]
    assert times == sorted(times)
    for before, step in itertools.pairwise(steps):
        assert step.gap_ns == step.started_ns - before.ended_ns
        launched = step.launched_ns <= before.ended_ns
        assert (before.running_step_id, before.queued_steps) == ((step.step_id, 1) if launched else (0, 0))
    assert (steps[-1].running_step_id, steps[-1].queued_steps) == (0, 0)


def test_a_hole_among_announced_steps_is_found(tiny):
    """The first row feeds from a cell that is elsewhere: it stays a hole, and the second row goes on."""
    reference, driver = new_driver(tiny), new_driver(tiny)
    expected = one_by_one(reference.runner, batches(reference, lose=5))
    bench = Bench(driver.runner)
    steps = bench.run(batches(driver, lose=5))
    bench.close()
    equal(steps, expected)
    mismatch = SampleStatus.POSITION_MISMATCH
    assert [step.samples.status[0] == mismatch for step in steps] == [index >= 5 for index in range(NUM_OUTPUTS)]
    assert all(step.samples.status[1] == SampleStatus.OK for step in steps)


def test_b6_no_step_of_a_new_epoch_begins_before_the_old_cells_are_gone(tiny):
    driver = new_driver(tiny)
    expected = one_by_one(driver.runner, made := list(batches(driver)))
    driver.runner.reset()
    bench = Bench(driver.runner)
    for _ in range(20):
        for batch in made[:3]:
            bench.launch(batch)
        bench.device.reset(2)
        steps = [bench.launch(dataclasses.replace(batch), epoch=2) for batch in made[:4]]
        for _ in range(7):
            bench.wait()
        equal(steps, expected[:4])
        bench.device.reset(1)
    bench.close()


def test_a_step_whose_end_is_held_is_not_followed(tiny):
    """hold_events: tables that must not depend on timing."""
    driver = new_driver(tiny)
    made = list(batches(driver))
    bench = Bench(driver.runner, single_step=True)
    first, second = bench.launch(made[0]), bench.launch(made[1])
    assert not driver.runner._chain._planned
    first.release.set()
    assert bench.wait() is first
    second.release.set()
    assert bench.wait() is second
    assert second.started_ns >= first.ended_ns
    bench.close()


def test_what_counts_as_greedy(tiny):
    driver = new_driver(tiny)
    seqs = [driver.admit(prompt) for prompt in PROMPTS]
    plain = columns(seqs)
    asked = AskedLogprobs(np.array([NO_LOGPROBS, 0], np.int32), np.zeros(2, np.bool_))
    assert is_greedy(plain)
    assert not is_greedy(dataclasses.replace(plain, temperature=np.array([0, 0.5], np.float32)))
    assert not is_greedy(dataclasses.replace(plain, suppressed=(None, np.array([3]))))
    assert not is_greedy(dataclasses.replace(plain, masks=(np.zeros(4, np.uint8), None)))
    assert not is_greedy(dataclasses.replace(plain, rule_states=(None, object())))
    assert not is_greedy(dataclasses.replace(plain, logprobs=asked))
