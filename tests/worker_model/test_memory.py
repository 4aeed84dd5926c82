"""Memory that does not suffice on the CPU: one error that says how much is needed, and what to lower."""

import pytest
import torch

from stepahead.worker.errors import ModelError
from stepahead.worker.model import checkpoint
from stepahead.worker.model.memory import cache_bytes_of, refused_without_memory
from stepahead.worker.model.random_checkpoint import RandomCheckpoint
from stepahead.worker.model.registry import make_runner
from stepahead.worker.runner import CacheGroup, CacheShape
from tests.worker_model.test_native import needs_native

KERNELS = ["torch", pytest.param("native", marks=needs_native)]


def shape(num_blocks: int, **fields) -> CacheShape:
    return CacheShape(
        num_slots=1,
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=16,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        **fields,
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_cache_that_does_not_fit_names_its_options(kernels):
    runner = make_runner("random:llama-tiny", dtype="float32", threads=1, kernels=kernels)
    facts = runner.load(lambda *call: None)
    with pytest.raises(ModelError, match="--num-kv-blocks") as caught:
        runner.allocate(shape(2**30))
    if kernels == "torch":
        size = 2**30 * 16 * facts.kv_bytes_per_token / 2**30
        assert str(caught.value).startswith(f"the KV cache needs {size:.2f} GiB, and ")
        assert "of memory are available: lower --num-kv-blocks, --kv-cache-bytes" in str(caught.value)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [("float32", "--dtype bfloat16 halves it, or take a smaller --model"), ("bfloat16", "take a smaller --model")],
)
def test_weights_that_do_not_fit_say_how_large_they_are(monkeypatch, kernels, dtype, remedy):
    class Heavy(RandomCheckpoint):
        def __init__(self, spec):
            super().__init__(spec)
            self.weights.read = lambda name: (torch.empty(2**60), 0)
            self.weights.shapes = {"a": (2**20, 3), "b": (2**20,)}

    monkeypatch.setattr(checkpoint, "RandomCheckpoint", Heavy)
    runner = make_runner("random:llama-tiny", dtype=dtype, threads=1, kernels=kernels)
    with pytest.raises(ModelError) as caught:
        runner.load(lambda *call: None)
    assert str(caught.value).startswith(f"the model needs {16 if dtype == 'float32' else 8}.0 MiB, and ")
    assert str(caught.value).endswith(f"of memory are available: {remedy}")


def test_other_errors_of_torch_stay_what_they_are():
    with pytest.raises(RuntimeError, match="size of tensor"), refused_without_memory("it", 1, "nothing"):
        torch.zeros(2) + torch.zeros(3)


def test_the_size_of_a_cache_counts_each_layer_by_its_group():
    windowed = shape(10, more_groups=(CacheGroup(num_blocks=4, window=8),), group_of_layer=(0, 1, 1))
    assert cache_bytes_of(shape(10), 24, 3) == 10 * 16 * 24
    assert cache_bytes_of(windowed, 24, 3) == (10 + 4 + 4) * 16 * 8
