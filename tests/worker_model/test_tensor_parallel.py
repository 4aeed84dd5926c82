"""Two processes compute what one does: every family, one pair of processes for all of them."""

from __future__ import annotations

import json
from contextlib import contextmanager

import numpy as np
import pytest

from stepahead.worker.errors import ModelError
from stepahead.worker.model.registry import make_runner
from stepahead.worker.ranks.start_up import complete_together
from tests.worker_model import rank_pair
from tests.worker_model.conftest import MIXTURES, VOCAB_SIZE
from tests.worker_model.core_driver import CoreDriver
from tests.worker_model.driver import Driver
from tests.worker_model.gguf_files import TYPES, write_gguf
from tests.worker_model.rank_pair import PLACE, connected_pair
from tests.worker_model.test_window_groups import shape_for

RNG = np.random.default_rng(23)
PROMPTS = [RNG.integers(3, VOCAB_SIZE, size).tolist() for size in (1, 13, 30, 27, 19, 30, 30)]


@pytest.fixture(scope="module")
def pair():
    with connected_pair() as ranks:
        yield ranks


@contextmanager
def driven(pair, spec, *, dtype="float32", **options):
    with pair.host(spec, dtype=dtype) as runner:
        yield Driver(runner, **options)


def load_different(pair, spec, other_spec):
    """Loads without a cache; the other rank loads something else."""
    pair.tell("host", str(other_spec), "float32")
    make_runner(str(spec), dtype="float32", threads=1, kernels="torch", place=PLACE).load(lambda *call: None)


def alone(spec, *, dtype="float32", **options):
    return Driver(make_runner(str(spec), dtype=dtype, threads=1, kernels="torch"), **options)


def logits_of_every_step(driver, *, chunk, num_outputs):
    return rank_pair.logits_of_every_step(
        driver, PROMPTS, lambda runner: runner._logits.logits.copy(), chunk=chunk, num_outputs=num_outputs
    )


# Shared and single KV heads, tied and not, biases, norms of heads and behind halves, caps, fused weights, experts.
# 131 ids do not divide by two.
SPLIT = [
    "llama-gqa-tied",
    "llama-mqa-head-dim",
    "llama-biases",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    *MIXTURES,
]


@pytest.mark.parametrize("variant", SPLIT)
def test_two_ranks_compute_the_logits_and_the_tokens_of_one(tiny, pair, variant):
    path, sizes = tiny(variant).path, {"num_blocks": 230}
    with driven(pair, path, **sizes) as driver:
        ours, tokens = logits_of_every_step(driver, chunk=11, num_outputs=12)
    single = alone(path, **sizes)
    expected, expected_tokens = logits_of_every_step(single, chunk=11, num_outputs=12)
    assert tokens == expected_tokens
    for one, two in zip(expected, ours, strict=True):
        assert two.shape == one.shape
        assert np.abs(two - one).max() < 1e-5 * np.abs(one).max()  # sums in another order
    assert driver.facts.fingerprint == single.facts.fingerprint
    assert driver.facts.device == "cpu x2"


def test_each_rank_keeps_its_own_kv_heads(tiny, pair):
    """Two KV heads: one each. One KV head: both have it."""
    for variant, copies in (("llama-biases", 1), ("llama-mqa-head-dim", 2)):
        with driven(pair, tiny(variant).path) as driver:
            single = alone(tiny(variant).path).facts
            assert driver.facts.kv_bytes_per_token == copies * single.kv_bytes_per_token
            cache = driver.runner._leader._shard.ops._attention.num_bytes
            assert cache == (64 + 1) * 4 * driver.facts.kv_bytes_per_token // 2
            assert driver.facts.weight_bytes < 1.5 * single.weight_bytes
            assert driver.facts.available_bytes > 1 << 20


def test_copied_and_zeroed_blocks_reach_every_rank(tiny, pair):
    path = tiny("llama-mha").path
    with driven(pair, path) as driver:
        parent, child = driver.admit(PROMPTS[4]), driver.admit(PROMPTS[4])
        driver.step([(parent, len(PROMPTS[4]) - 1)])
        child.num_fed = parent.num_fed
        driver.step([(child, 1)], copies=tuple(zip(parent.blocks, child.blocks, strict=True)))
        driver.step([(parent, 1)], zeroed_blocks=tuple(parent.blocks))
        driver.run([child], 6)
    expected = tiny("llama-mha").greedy(PROMPTS[4], 6)
    assert child.outputs == expected
    assert parent.outputs != expected[:1]


def test_n6_n7_two_ranks_replay_windows_as_one(tiny, pair):
    """A loss behind eight outputs; each rank has its own heads' keys to leave alone, and to rebuild."""
    model, prompt = tiny("mistral-window"), PROMPTS[2]
    with pair.host(model.path) as runner:
        facts = runner.load(lambda what, done, total: None)
        shape = shape_for(facts, 24, replays_windows=True)
        runner.allocate(shape)
        driver = CoreDriver(runner, facts, shape)
        driver.add(0, prompt, 16)
        driver.run(max_commits=8)
        driver.lose()
        assert driver.run()[0] == model.greedy(prompt, 16)
        assert driver.scheduler.totals.window_replays == 1


def test_the_shards_of_a_gguf_file(tiny, pair, tmp_path):
    model = tiny("llama-blocks")
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", kind=TYPES.Q8_0)
    with driven(pair, path) as driver:
        tokens = driver.run([driver.admit(prompt) for prompt in PROMPTS[:2]], 8, chunk=9)
    single = alone(path)
    assert tokens == single.run([single.admit(prompt) for prompt in PROMPTS[:2]], 8, chunk=9)


def test_bfloat16_differs_by_rounding(tiny, pair):
    path, sizes = tiny("qwen3").path, {"num_blocks": 230}
    with driven(pair, path, dtype="bfloat16", **sizes) as driver:
        (two, *_), _ = logits_of_every_step(driver, chunk=30, num_outputs=1)
    (one, *_), _ = logits_of_every_step(alone(path, **sizes), chunk=30, num_outputs=1)
    errors = np.linalg.norm(two - one, axis=1) / np.linalg.norm(one, axis=1)
    assert 1e-6 < np.median(errors) < 0.15


def test_ranks_with_different_models_refuse_to_start(tiny, pair):
    with pytest.raises(ModelError, match=r"rank 1 has another model than rank 0, or another dtype .*same files"):
        load_different(pair, tiny("llama-mha").path, tiny("llama-gqa-tied").path)


def test_a_rank_that_cannot_load_is_named(tiny, pair, tmp_path):
    """Whichever it is, the other one does not wait for it."""
    with pytest.raises(ModelError, match=f"rank 1: --model '{tmp_path}/none' is nothing that exists here"):
        load_different(pair, tiny("llama-mha").path, tmp_path / "none")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny("llama-mha").path / name)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 130}))
    with pytest.raises(
        ModelError, match=r"embed_tokens.weight has shape \[131, 32\], the configuration says \[130, 32\]"
    ):
        load_different(pair, tmp_path, tiny("llama-mha").path)


def test_a_rank_whose_cache_does_not_fit_is_named(pair):
    pair.tell("allocate", "no memory")
    with pytest.raises(ModelError, match="rank 1: no memory"):
        complete_together(pair.group, lambda: None)


def test_two_ranks_run_in_torch_and_say_so(tiny):
    with pytest.raises(ModelError, match=r"not available: the step library computes on one rank, not on 2"):
        make_runner(str(tiny("llama-mha").path), kernels="native", place=PLACE).load(lambda *call: None)
    with pytest.raises(ModelError, match="--tensor-parallel-size 2: a toy model computes on one rank"):
        make_runner("toy:tagged", place=PLACE)
