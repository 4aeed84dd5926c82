"""What the teaching models tell of their steps: additions, and the values a next token follows from."""

import pytest

from stepahead.worker.errors import ModelError
from stepahead.worker.model.registry import make_runner
from tests.worker_model.driver import Driver


def traced(spec, prompt, num_outputs, *, chunk=64):
    """Runs one sequence; returns its outputs and the trace of every step."""
    driver = Driver(make_runner(spec), block_size=2)
    traces = []
    sample = driver.runner.sample

    def keep(batch):
        samples = sample(batch)
        traces.append(samples.traces)
        return samples

    driver.runner.sample = keep
    outputs = driver.run([driver.admit(prompt)], num_outputs, chunk=chunk)[0]
    return outputs, [step[0] for step in traces if step], traces


@pytest.mark.parametrize("num_outputs", [3, 5])
@pytest.mark.parametrize("prompt", [[1, 2, 3, 5], [9], [0, 0, 7], list(range(10))])
def test_running_sum_with_and_without_reuse(prompt, num_outputs):
    n, m = len(prompt), num_outputs
    reused, traces, _ = traced("toy:running-sum", prompt, m)
    recomputed, all_traces, _ = traced("toy:running-sum?reuse=off", prompt, m)
    assert reused == recomputed
    assert sum(trace.num_additions for trace in traces) == n + m - 1
    assert sum(trace.num_additions for trace in all_traces) == m * n + m * (m - 1) // 2
    history = prompt + reused
    assert all_traces[-1].inputs == tuple(history[:-1])
    assert traces[-1].inputs == (sum(history[:-1]),)


def test_a_chunk_that_does_not_sample_adds_nothing_without_reuse():
    _, _, traces = traced("toy:running-sum?reuse=off", [1, 2, 3, 5], 1, chunk=3)
    assert [len(step) for step in traces] == [0, 1]
    assert traces[1][0].num_additions == 4


def test_window_is_told_after_every_row():
    outputs, traces, _ = traced("toy:window-sum", [1, 2, 3, 5], 5, chunk=2)
    assert outputs == [0, 8, 3, 1, 2]
    assert [trace.inputs for trace in traces] == [(1, 2), (2, 3, 5), (3, 5, 0), (5, 0, 8), (0, 8, 3), (8, 3, 1)]
    assert {trace.row for trace in traces} == {0}


def test_traces_name_the_row_of_the_batch():
    driver = Driver(make_runner("toy:window-sum"))
    hole, seq = driver.admit([1, 2]), driver.admit([3, 4])
    driver.step([(hole, 2), (seq, 2)])
    batch = driver.batch([(hole, 1), (seq, 1)], positions={0: 9})
    driver.runner.forward(batch)
    assert [(trace.row, trace.inputs) for trace in driver.runner.sample(batch).traces] == [(1, (3, 4, 7))]
    nothing = driver.batch([(hole, 1)], positions={0: 9})
    driver.runner.forward(nothing)
    assert driver.runner.sample(nothing).traces == ()


def test_other_models_tell_nothing():
    driver = Driver(make_runner("toy:score-table"))
    batch = driver.batch([(driver.admit([0]), 1)])
    driver.runner.forward(batch)
    assert driver.runner.sample(batch).traces == ()


def test_reuse_is_on_or_off():
    with pytest.raises(ModelError, match="reuse must be one of on, off"):
        make_runner("toy:running-sum?reuse=maybe")
