"""Models of random weights: every tensor a Llama has, no two layers alike, the real one's size."""

import pytest
import torch

from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.model.checkpoint import open_checkpoint
from stepahead.worker.model.random_checkpoint import RandomCheckpoint
from stepahead.worker.model.registry import make_runner
from tests.worker_model.driver import Driver


def test_the_large_one_has_the_sizes_of_llama_3_8b():
    checkpoint = RandomCheckpoint("random:llama-8b")
    assert checkpoint.weights.total_bytes == 2 * 8_030_261_248
    values, stored_bytes = checkpoint.weights.read("model.layers.3.self_attn.k_proj.weight")
    assert (values.shape, stored_bytes) == ((1024, 4096), 2 * 1024 * 4096)
    assert float(values.float().std()) == pytest.approx(4096**-0.5, rel=0.01)


def test_the_tiny_one_generates_the_same_every_time():
    outputs = []
    for _ in range(2):
        driver = Driver(make_runner("random:llama-tiny", dtype="float32", threads=1, kernels="torch"))
        seq = driver.admit(range(3, 20))
        driver.run([seq], 8, chunk=5)
        outputs.append(seq.outputs)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 2


def test_a_length_beyond_the_model_is_refused_before_weights_are_read():
    read: list[int] = []
    runner = make_runner("random:llama-tiny", threads=1, kernels="torch", max_model_len=10**9)
    with pytest.raises(
        OptionRefused, match=r"--max-model-len 1000000000 is more than the [0-9]+ positions random:"
    ):
        runner.load(lambda what, done, total: read.append(done))
    assert not read


def test_layers_differ():
    weights = RandomCheckpoint("random:llama-tiny").weights
    first, second = (weights.read(f"model.layers.{index}.mlp.up_proj.weight")[0] for index in (0, 1))
    assert not torch.equal(first, second)


def test_what_does_not_exist_is_refused():
    with pytest.raises(ModelError, match="random:llama-8b, random:llama-tiny"):
        open_checkpoint("random:gpt-5")
    with pytest.raises(ModelError, match="no tensor"):
        RandomCheckpoint("random:llama-tiny").weights.read("model.layers.9.mlp.up_proj.weight")
