"""Models with windows in pools far too small for their sequences, against `transformers` in float32.

The real core plans: prompts longer than the pool, chunks of many sizes, preemptions, losses, prefix hits. What left
a window belongs to somebody else soon after, so a block that is read too late gives another token.
"""

from dataclasses import replace

import numpy as np
import pytest

from stepahead.worker.model.registry import make_runner
from stepahead.worker.runner import CacheGroup, CacheShape
from tests.kernels.step_model import available_sets
from tests.worker_model.conftest import VOCAB_SIZE
from tests.worker_model.core_driver import CoreDriver

RNG = np.random.default_rng(21)
PROMPTS = [RNG.integers(3, VOCAB_SIZE, size).tolist() for size in (5, 19, 30, 61)]
KERNELS = ["torch", *(["native"] if available_sets() else [])]
# Window of each tiny model, and whether layers that see everything stand beside those that do not.
MODELS = {
    "mistral-window": (7, False),
    "phi3": (9, False),
    "qwen2-window": (5, True),
    "gemma2": (8, True),
    "gemma3": (8, True),
    "mistral-wide-window": (40, False),
}
SHAPE = CacheShape(
    num_slots=8, num_blocks=48, block_size=4, max_model_len=96, max_num_batched_tokens=16, max_num_seqs=4
)


def shape_for(facts, pool, num_blocks=SHAPE.num_blocks, **sizes):
    """`pool` blocks for the layers that see a window, `num_blocks` for the others, if there are any."""
    windows = sorted(set(facts.layer_windows))
    of_layer = tuple(windows.index(window) for window in facts.layer_windows)
    if windows[0]:
        return replace(SHAPE, num_blocks=pool, window=windows[0], group_of_layer=of_layer, **sizes)
    groups = (CacheGroup(windows[1], pool),)
    return replace(SHAPE, num_blocks=num_blocks, more_groups=groups, group_of_layer=of_layer, **sizes)


def serve(model, kernels, pool, *, policy=None, **sizes):
    runner = make_runner(str(model.path), dtype="float32", threads=1, kernels=kernels)
    facts = runner.load(lambda what, done, total: None)
    shape = shape_for(facts, pool, **sizes)
    runner.allocate(shape)
    return CoreDriver(runner, facts, shape, **(policy or {}))


def check(model, prompts, outputs):
    """Every output is the original's largest logit after what stands before it."""
    for key, prompt in enumerate(prompts):
        answer = outputs[key]
        logits = model.logits(prompt + answer[:-1])[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer


def pool_for(window, depth=1):
    return -(-(window + depth) // SHAPE.block_size) + 1


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_n8_answers_from_a_window_pool_equal_transformers(tiny, name, kernels):
    """Two sequences' worth of window blocks for four requests, the longest prompt many times the window."""
    window, is_mixed = MODELS[name]
    model = tiny(name)
    driver = serve(model, kernels, 2 * pool_for(window) + 1)
    for key, prompt in enumerate(PROMPTS):
        driver.add(key, prompt, 24)
    check(model, PROMPTS, driver.run())
    assert driver.most_blocks[-1] <= 2 * pool_for(window) + 1
    if is_mixed:
        assert driver.most_blocks[0] > driver.most_blocks[1], "layers that see everything need more"


@pytest.mark.parametrize("budget", [4, 5, 7, 9, 17, 64])
@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_n11_prompts_longer_than_the_pool_in_chunks_of_many_sizes(tiny, name, budget):
    """The least pool that takes one sequence of any length."""
    window, _ = MODELS[name]
    model = tiny(name)
    driver = serve(model, KERNELS[-1], pool_for(window), max_num_batched_tokens=budget)
    for key, prompt in enumerate(PROMPTS):
        driver.add(key, prompt, 8)
    check(model, PROMPTS, driver.run())


@pytest.mark.parametrize("kernels", KERNELS)
def test_n13_prompts_around_the_borders(tiny, kernels):
    """W - 1, W, W + 1, B - 1, B, B + 1 and multiples as lengths, all in one batch after another."""
    model = tiny("gemma2")
    lengths = [1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24]
    prompts = [RNG.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    driver = serve(model, kernels, 9)
    for key, prompt in enumerate(prompts):
        driver.add(key, prompt, 10)
    check(model, prompts, driver.run())


@pytest.mark.parametrize("length", [7, 8, 9])
def test_n13_a_loss_after_every_number_of_steps(tiny, length):
    """Prompts of W - 1, W and W + 1: every border of blocks and window is a point of return."""
    model = tiny("gemma2")
    prompt = PROMPTS[3][:length]
    driver = serve(model, KERNELS[-1], 5)
    expected = model.greedy(prompt, 12)
    for commits in range(1, 12):
        driver.add(commits, prompt, 12, cache_salt=str(commits))
        driver.run(max_commits=commits)
        driver.lose()
        assert driver.run()[commits] == expected


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", ["mistral-wide-window", "gemma3"])
def test_g7_n14_preempted_and_lost_requests_go_on_as_if_nothing_had_happened(tiny, name, depth):
    """Memory runs short, and the worker is lost after every few steps: all of the history is fed again."""
    model = tiny(name)
    pool = pool_for(MODELS[name][0], depth)
    driver = serve(model, KERNELS[-1], 2 * pool - 2, policy={"overlap_depth": depth}, num_blocks=24)
    for key, prompt in enumerate(PROMPTS[:3]):
        driver.add(key, prompt, 30)
    for commits in (3, 5, 8, 13):
        driver.run(max_commits=commits)
        driver.lose()
    check(model, PROMPTS[:3], driver.run())
    assert driver.scheduler.totals.preemptions > 0


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["mistral-window", "gemma2"])
def test_n12_hits_with_and_without_their_window_give_the_same_tokens(tiny, name, kernels):
    """The same question cold, behind a whole hit, and after others have taken the window's blocks."""
    model = tiny(name)
    question = PROMPTS[3] + PROMPTS[0]
    driver = serve(model, kernels, 14)
    cached = []
    for key, prompt in enumerate([PROMPTS[3], question, PROMPTS[2], PROMPTS[1], question]):
        driver.add(key, prompt, 12)
        before = driver.scheduler.totals.cached_tokens
        driver.run()
        cached.append(driver.scheduler.totals.cached_tokens - before)
    check(model, [PROMPTS[3], question, PROMPTS[2], PROMPTS[1], question], driver.outputs)
    assert cached[1] >= 56
    assert cached[4] < cached[1]
    assert driver.outputs[1] == driver.outputs[4]
