"""Every family against `transformers`, and what each engine does with it; logits: test_logits, test_native."""

import json

import numpy as np
import pytest
import torch

from stepahead.worker.model.registry import make_runner
from tests.kernels.step_model import available_sets
from tests.worker_model.conftest import MIXTURES, VARIANTS, VOCAB_SIZE
from tests.worker_model.driver import Driver

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(3, VOCAB_SIZE, size).tolist() for size in (5, 19, 30)]
KERNELS = ["torch", *(["native"] if available_sets() else [])]
# What each was added for: a window, no rotation, caps and post norms, two bases, fused weights, routing.
ADDED = list(VARIANTS)[list(VARIANTS).index("qwen3") :]
CASES = [(kernels, name) for kernels in KERNELS for name in ADDED]


def driver_for(model, kernels, dtype="float32", **options):
    return Driver(make_runner(str(model.path), dtype=dtype, threads=1, kernels=kernels), **options)


def choices(model, prompt, outputs):
    """The original's largest logit after the prompt and after each output but the last, from one forward."""
    return model.logits(prompt + outputs[:-1])[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize(("kernels", "variant"), CASES)
def test_float32_greedy_tokens_over_64_steps(tiny, kernels, variant):
    model = tiny(variant)
    driver = driver_for(model, kernels, num_blocks=200)
    for chunk in (3, 11):
        seqs = [driver.admit(prompt) for prompt in PROMPTS]
        driver.run(seqs, 64, chunk=chunk)
        for seq in seqs:
            outputs = seq.outputs[:64]
            if variant != "gemma":  # see conftest
                assert len(set(outputs)) > 2
            assert choices(model, seq.prompt, outputs) == outputs
            driver.release(seq)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_h7_chunk_sizes_1_to_17(tiny, kernels, variant):
    model = tiny(variant)
    prompt = np.random.default_rng(2).integers(3, VOCAB_SIZE, 40).tolist()
    expected = model.logits(prompt)[-1]
    driver = driver_for(model, kernels)
    for chunk in range(1, 18):
        seq = driver.admit(prompt)
        driver.run([seq], 1, chunk=chunk)
        np.testing.assert_allclose(driver.runner._logits.logits[0], expected, atol=1e-3, err_msg=str(chunk))
        driver.release(seq)


@pytest.mark.parametrize("window", [1, 4, 29, 30, 31, 64])
@pytest.mark.parametrize("kernels", KERNELS)
def test_windows_smaller_and_larger_than_the_prompt(tiny, tmp_path, kernels, window):
    import transformers

    model = tiny("mistral-window").model
    transformers.MistralConfig(**{**model.config.to_dict(), "sliding_window": window}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tiny("mistral-window").path / "model.safetensors")
    original = transformers.MistralForCausalLM.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        expected = original(torch.tensor([PROMPTS[2]])).logits[0, -1].numpy()
    driver = Driver(make_runner(str(tmp_path), dtype="float32", threads=1, kernels=kernels))
    for chunk in (1, 7, 30):
        seq = driver.admit(PROMPTS[2])
        driver.run([seq], 1, chunk=chunk)
        np.testing.assert_allclose(driver.runner._logits.logits[0], expected, atol=1e-3)
        driver.release(seq)


@pytest.mark.parametrize("kernels", KERNELS)
def test_longrope_goes_by_the_longest_sequence_that_is_served(tiny, kernels):
    """Within the trained context: the short set, as transformers computes prompts that fit it."""
    model = tiny("phi3-longrope")
    driver = driver_for(model, kernels, max_model_len=16)
    seq = driver.admit(PROMPTS[0])
    driver.run([seq], 11, chunk=4)
    assert seq.outputs == model.greedy(PROMPTS[0], 11)


@pytest.mark.parametrize("variant", ADDED)
def test_bfloat16_on_torch_is_about_as_near_to_float32_as_transformers_bfloat16(tiny, variant):
    import copy

    narrow = copy.deepcopy(tiny(variant).model).bfloat16()
    wide = copy.deepcopy(narrow).float()  # the same weights
    prompts = np.random.default_rng(3).integers(3, VOCAB_SIZE, (12, 19))
    with torch.inference_mode():
        exact, theirs = (model(torch.tensor(prompts)).logits[:, -1].float().numpy() for model in (wide, narrow))
    driver = driver_for(tiny(variant), "torch", "bfloat16", num_slots=12, num_blocks=60, max_model_len=20)
    seqs = [driver.admit(prompt.tolist()) for prompt in prompts]
    driver.step([(seq, 19) for seq in seqs])
    error, their_error = (
        np.median(np.linalg.norm(logits - exact, axis=1) / np.linalg.norm(exact, axis=1))
        for logits in (driver.runner._logits.logits, theirs)
    )
    # A mixture's rounding now and then chooses another expert where two are near.
    assert 1e-6 < error < min((2 if variant in MIXTURES else 1.5) * their_error, 0.15)


def test_the_language_model_of_gemma_3_beside_a_vision_tower(tiny, tmp_path):
    """Its names have a prefix, its configuration is an object in the configuration, and much of it is left out."""
    from safetensors.torch import load_file, save_file

    model = tiny("gemma3")
    text = json.loads((model.path / "config.json").read_text())
    text.pop("model_type")
    around = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "eos_token_id": [7, 9],
    }
    (tmp_path / "config.json").write_text(json.dumps(around))
    tensors = load_file(model.path / "model.safetensors")
    for prefix in ("language_model.", "model.language_model."):
        renamed = {
            (prefix + name if prefix == "language_model." else name.replace("model.", prefix, 1)): tensor
            for name, tensor in tensors.items()
        }
        save_file({**renamed, "vision_tower.x": torch.zeros(2)}, tmp_path / "model.safetensors")
        driver = Driver(make_runner(str(tmp_path), dtype="float32", threads=1))
        seq = driver.admit(PROMPTS[1])
        driver.run([seq], 4)
        assert seq.outputs == model.greedy(PROMPTS[1], 4)
