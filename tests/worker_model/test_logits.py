"""The torch decoder against `transformers` in float32, through chunks, shuffled blocks and mixed batches."""

import json

import numpy as np
import pytest
import torch

from stepahead.worker.errors import ModelError
from stepahead.worker.model.registry import make_runner
from tests.worker_model.conftest import VARIANTS, VOCAB_SIZE
from tests.worker_model.driver import Driver

PROMPT = np.random.default_rng(4).integers(3, VOCAB_SIZE, 19).tolist()


def driver_for(model, **options):
    return Driver(make_runner(str(model.path), dtype="float32", threads=1, kernels="torch"), **options)


def logits_of(driver):
    return driver.runner._logits.logits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 4, 19])
def test_logits_of_every_family(tiny, variant, chunk):
    model = tiny(variant)
    expected = model.logits(PROMPT)
    assert expected.std() > 0.5  # else agreement means nothing
    driver = driver_for(model)
    seq = driver.admit(PROMPT)
    driver.run([seq], 1, chunk=chunk)
    np.testing.assert_allclose(logits_of(driver)[0], expected[-1], atol=1e-3)


@pytest.mark.parametrize("chunk", range(1, 10))
def test_h7_chunk_size_does_not_change_logits(tiny, chunk):
    model = tiny("llama-gqa-tied")
    driver = driver_for(model, block_size=3, seed=chunk)
    seq = driver.admit(PROMPT)
    driver.run([seq], 1, chunk=chunk)
    np.testing.assert_allclose(logits_of(driver)[0], model.logits(PROMPT)[-1], atol=1e-3)


def test_mixed_batches_give_each_sequence_its_own_tokens(tiny):
    model = tiny("llama-gqa-tied")
    rng = np.random.default_rng(9)
    prompts = [rng.integers(3, VOCAB_SIZE, size).tolist() for size in (3, 17, 1, 30, 8, 11)]
    driver = driver_for(model, num_blocks=200, max_model_len=64)
    seqs = [driver.admit(prompt) for prompt in prompts[:2]]
    # Arrivals in the middle: chunks, decodes of many lengths and first tokens share steps.
    for prompt in prompts[2:]:
        driver.step([(seq, min(5, len(seq.prompt) - seq.num_fed) if not seq.decoding else 1) for seq in seqs])
        seqs.append(driver.admit(prompt))
    driver.run(seqs, 12, chunk=5)
    for seq in seqs:
        assert seq.outputs[:12] == model.greedy(seq.prompt, 12)


def test_blocks_and_slots_are_reusable(tiny):
    model = tiny("qwen2")
    driver = driver_for(model, num_blocks=12, num_slots=2, max_model_len=24)
    for size in (20, 3, 17):
        seq = driver.admit(PROMPT[:size], num_tokens=24)
        assert driver.run([seq], 4, chunk=7) == [model.greedy(PROMPT[:size], 4)]
        driver.release(seq)


def test_copied_blocks_continue_like_the_original(tiny):
    model = tiny("llama-mha")
    driver = driver_for(model)
    parent = driver.admit(PROMPT)
    driver.step([(parent, len(PROMPT) - 1)])
    child = driver.admit(PROMPT)
    copies = tuple(zip(parent.blocks, child.blocks, strict=True))
    child.num_fed = parent.num_fed
    driver.step([(child, 1), (parent, 1)], copies=copies)
    driver.run([parent, child], 6)
    assert child.outputs == parent.outputs == model.greedy(PROMPT, 6)


def test_j3_sampled_tokens_do_not_depend_on_batch_neighbours(tiny):
    model = tiny("llama-gqa-tied")
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 77}
    alone = driver_for(model)
    seq = alone.admit(PROMPT, **sampling)
    expected = alone.run([seq], 10)[0]
    crowd = driver_for(model, num_blocks=300, max_model_len=64, seed=3)
    others = [crowd.admit(PROMPT[:size], temperature=1.0, seed=size, top_k=5) for size in (4, 9, 13)]
    seq = crowd.admit(PROMPT, **sampling)
    crowd.run([seq, *others], 10, chunk=6)
    assert seq.outputs == expected


def test_j4_other_seed_or_choice_gives_other_tokens(tiny):
    driver = driver_for(tiny("llama-gqa-tied"), num_blocks=300, max_model_len=64)
    variants = [{"seed": 1}, {"seed": 2}, {"seed": 1, "choice_index": 1}, {"seed": 1}]
    outputs = driver.run([driver.admit(PROMPT, temperature=2.0, **variant) for variant in variants], 10)
    assert outputs[0] == outputs[3]
    assert len({tuple(tokens) for tokens in outputs}) == 3


def test_j10_a_row_of_nan_fails_alone(tiny):
    model = tiny("llama-mha")
    driver = driver_for(model)
    bad, good = driver.admit(PROMPT), driver.admit(PROMPT[:7])
    driver.step([(bad, 5), (good, 7)])
    with torch.inference_mode():
        driver.runner._model[1].ops._attention._caches[0][:, bad.blocks[0]] = float("nan")
    assert driver.step([(good, 1), (bad, len(PROMPT) - 5)]) == [0, 1]
    driver.run([good], 6)
    assert good.outputs == model.greedy(PROMPT[:7], 6)


def test_masks_and_suppressed_ids_apply(tiny):
    driver = driver_for(tiny("llama-mha"))
    bits = np.zeros(VOCAB_SIZE, np.uint8)
    bits[[40, 50]] = 1
    mask = np.packbits(bits, bitorder="little")
    seq = driver.admit(PROMPT, mask=mask)
    assert driver.run([seq], 3)[0] in [[a, b, c] for a in (40, 50) for b in (40, 50) for c in (40, 50)]
    both = driver.admit(PROMPT, mask=mask, suppressed=np.array([40, 50]))
    assert driver.step([(both, len(PROMPT))]) == [3]


def test_facts(tiny):
    model = tiny("llama-gqa-tied")
    calls = []
    runner = make_runner(str(model.path), dtype="bfloat16", threads=1, kernels="torch")
    facts = runner.load(lambda *call: calls.append(call))
    assert (facts.vocab_size, facts.max_context_tokens, facts.eos_token_ids) == (VOCAB_SIZE, 128, (2,))
    assert (facts.bos_token_id, facts.dtype, facts.device, facts.tokenizer_bundle) == (1, "bfloat16", "cpu", b"")
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * 8 * 2
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    assert facts.weight_bytes == 2 * parameters
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1] == calls[-1][2] == (model.path / "model.safetensors").stat().st_size


def test_fingerprint_names_configuration_and_weights(tiny, tmp_path):
    def fingerprint(path, dtype="float32"):
        return make_runner(str(path), dtype=dtype, threads=1).load(lambda *call: None).fingerprint

    first = fingerprint(tiny("llama-mha").path)
    assert first == fingerprint(tiny("llama-mha").path)
    others = {fingerprint(tiny("llama-rope-linear").path), fingerprint(tiny("llama-mha").path, "bfloat16")}
    assert first not in others
    assert len(others) == 2


def test_auto_dtype_keeps_float32_checkpoints(tiny):
    assert make_runner(str(tiny("llama-mha").path)).load(lambda *call: None).dtype == "float32"


def test_sharded_weights(tiny, tmp_path):
    model = tiny("llama-mha")
    model.model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    driver = Driver(make_runner(str(tmp_path), dtype="float32", threads=1))
    assert driver.run([driver.admit(PROMPT)], 5) == [model.greedy(PROMPT, 5)]
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match="missing"):
        make_runner(str(tmp_path)).load(lambda *call: None)


def test_wrong_shape_is_named(tiny, tmp_path):
    tiny("llama-mha").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 47}))
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \[48, 32\].*\[47, 32\]"):
        make_runner(str(tmp_path)).load(lambda *call: None)


def test_max_model_len_beyond_the_model_is_refused(tiny):
    with pytest.raises(ModelError, match="max_model_len 129"):
        driver_for(tiny("llama-mha"), max_model_len=129)
