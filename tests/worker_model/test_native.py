"""The compiled step against `transformers` in float32, and bit by bit against itself."""

import copy
import os

import numpy as np
import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from stepahead.kernels.cpu.step import decoder_step
from stepahead.kernels.cpu.step.build import BuildUnavailable
from stepahead.kernels.cpu.step.library import InstructionSet
from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.model import cpu_runner, native_engine
from stepahead.worker.model.registry import KERNELS_ENV, make_runner
from stepahead.worker.runner import CacheShape
from tests.kernels.step_model import EMULATED, available_sets, bf16_sets, emulation
from tests.worker_model.conftest import VARIANTS, VOCAB_SIZE
from tests.worker_model.driver import Driver

PROMPT = np.random.default_rng(4).integers(3, VOCAB_SIZE, 19).tolist()
SETS = available_sets()

needs_native = pytest.mark.skipif(not SETS, reason="the step library cannot be built here")


@pytest.fixture
def native(monkeypatch):
    """Returns a function: model -> a driver of it on the compiled step, by instruction set."""

    def make(model, isa=None, dtype="float32", threads=1, **options):
        if isa == EMULATED:
            isa = InstructionSet.AMX_BF16.name
            monkeypatch.setattr(decoder_step, "step_library", emulation)
            monkeypatch.setattr(cpu_runner, "native_instruction_set", lambda wanted: (wanted, ""))
        kernels = "native" if isa is None else isa.lower()
        runner = make_runner(str(model.path), dtype=dtype, threads=threads, kernels=kernels)
        return Driver(runner, **options)

    return make


def logits_of(driver):
    return driver.runner._logits.logits


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_family(tiny, native, variant, isa):
    model = tiny(variant)
    expected = model.logits(PROMPT)
    assert expected.std() > 0.5  # else agreement means nothing
    for chunk in (1, 4, 19):
        driver = native(model, isa)
        driver.run([driver.admit(PROMPT)], 1, chunk=chunk)
        np.testing.assert_allclose(logits_of(driver)[0], expected[-1], atol=1e-3)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("variant", ["llama-gqa-tied", "qwen2", "qwen3"])
def test_float32_greedy_tokens_over_64_steps(tiny, native, variant, isa):
    model = tiny(variant)
    driver = native(model, isa, num_blocks=200)
    seqs = [driver.admit(PROMPT[:size]) for size in (5, 19)]
    driver.run(seqs, 64, chunk=6)
    for seq in seqs:
        assert seq.outputs == model.greedy(seq.prompt, 64)


@pytest.mark.parametrize("isa", bf16_sets())
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_about_as_near_to_float32_as_transformers_bfloat16(tiny, native, variant, isa):
    narrow = copy.deepcopy(tiny(variant).model).bfloat16()
    wide = copy.deepcopy(narrow).float()  # the same weights
    prompts = np.random.default_rng(3).integers(3, VOCAB_SIZE, (12, 19))
    with torch.inference_mode():
        exact, theirs = (model(torch.tensor(prompts)).logits[:, -1].float().numpy() for model in (wide, narrow))
    driver = native(tiny(variant), isa, "bfloat16", num_slots=12, num_blocks=60, max_model_len=20)
    seqs = [driver.admit(prompt.tolist()) for prompt in prompts]
    driver.step([(seq, 19) for seq in seqs])
    # The median: one prompt near a fork of a random model would outweigh the eleven others in a sum.
    error, their_error = (
        np.median(np.linalg.norm(logits - exact, axis=1) / np.linalg.norm(exact, axis=1))
        for logits in (logits_of(driver), theirs)
    )
    assert 1e-6 < error < min(1.25 * their_error, 0.1)


def last_logits(driver, prompt, steps):
    """Feeds a prompt in the given chunks; returns the bits of its last logits."""
    seq = driver.admit(prompt)
    for count in steps:
        driver.step([(seq, count)])
    return logits_of(driver)[0].view(np.uint32)


def logits_in_a_crowd(driver, prompt, chunk):
    """The same among prefills and decode rows, the prompt's last token as a row of its own."""
    others = [driver.admit(np.random.default_rng(size).integers(3, VOCAB_SIZE, size)) for size in (3, 9, 31, 2, 14)]
    seq = driver.admit(prompt)
    while not seq.decoding:
        rest = len(prompt) - seq.num_fed
        count = 1 if rest <= 3 else min(chunk, rest - 3)
        crowd = [(row, 1 if row.decoding else min(5, len(row.prompt) - row.num_fed)) for row in others]
        driver.step([*crowd[:3], (seq, count), *crowd[3:]])
    return logits_of(driver)[-1 - len(crowd[3:])].view(np.uint32)


@pytest.mark.parametrize(
    ("isa", "dtype"), [*((isa, "float32") for isa in SETS), *((isa, "bfloat16") for isa in bf16_sets())]
)
@pytest.mark.parametrize(
    "variant", ["llama-gqa-tied", "llama-mqa-head-dim", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "phi3"]
)
def test_h7_the_same_bits_however_tokens_are_batched(tiny, native, variant, dtype, isa):
    model = tiny(variant)
    prompt = np.random.default_rng(8).integers(3, VOCAB_SIZE, 101).tolist()
    sizes = {"num_blocks": 400, "block_size": 16}
    expected = last_logits(native(model, isa, dtype, **sizes), prompt, [101])
    for seed, steps in enumerate([[1] * 101, [50, 51], [7, 30, 1, 63], [13] * 7 + [10], [100, 1]]):
        driver = native(model, isa, dtype, seed=seed + 1, **sizes)
        np.testing.assert_array_equal(last_logits(driver, prompt, steps), expected, str(steps))
    for chunk in (1, 17, 40):
        driver = native(model, isa, dtype, seed=chunk, **sizes)
        np.testing.assert_array_equal(logits_in_a_crowd(driver, prompt, chunk), expected, str(chunk))
    # Nor does it matter how many threads share the work, or how long a block is.
    for options in ({"threads": 2}, {"threads": 3}, {"num_blocks": 400, "block_size": 32}):
        driver = native(model, isa, dtype, **{**sizes, **options})
        np.testing.assert_array_equal(last_logits(driver, prompt, [60, 41]), expected, str(options))


@needs_native
def test_j10_a_row_of_nan_fails_alone(tiny, native):
    model = tiny("llama-mha")
    driver = native(model)
    bad, good = driver.admit(PROMPT), driver.admit(PROMPT[:7])
    driver.step([(bad, 5), (good, 7)])
    for part in driver.runner._model[1].step.cache_memory():
        part[:, bad.blocks[0]] = np.nan
    assert driver.step([(good, 1), (bad, len(PROMPT) - 5)]) == [0, 1]
    driver.run([good], 6)
    assert good.outputs == model.greedy(PROMPT[:7], 6)


@needs_native
def test_sampled_rows_and_greedy_rows_share_a_step(tiny, native):
    model = tiny("llama-gqa-tied")
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 77}
    driver = native(model, num_blocks=200)
    expected = driver.run([driver.admit(PROMPT, **sampling)], 8)[0]
    seqs = [driver.admit(PROMPT), driver.admit(PROMPT, **sampling), driver.admit(PROMPT[:9])]
    driver.run(seqs, 8)
    assert [seq.outputs for seq in seqs] == [model.greedy(PROMPT, 8), expected, model.greedy(PROMPT[:9], 8)]


@needs_native
def test_facts_and_progress(tiny):
    model = tiny("llama-gqa-tied")
    calls = []
    runner = make_runner(str(model.path), dtype="bfloat16", threads=1, kernels="native")
    facts = runner.load(lambda *call: calls.append(call))
    assert facts.weight_bytes == 2 * sum(parameter.numel() for parameter in model.model.parameters())
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * 32 * 2  # a head of 8 takes 32
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1] == ("weights", *[(model.path / "model.safetensors").stat().st_size] * 2)


@needs_native
def test_what_is_too_much_is_named_with_its_options(tiny):
    path = str(tiny("llama-gqa-tied").path)
    with pytest.raises(ModelError, match=r"num_threads must be in 1\.\.256, not 257"):
        make_runner(path, threads=257, kernels="native").load(lambda *call: None)
    runner = make_runner(path, threads=1, kernels="native")
    runner.load(lambda *call: None)
    too_large = CacheShape(
        num_slots=2,
        num_blocks=2**31 - 1,
        block_size=1024,
        max_model_len=64,
        max_num_batched_tokens=8,
        max_num_seqs=2,
    )
    with pytest.raises(
        ModelError, match=r"of 8 tokens and .* 2147483647 blocks .*--max-num-batched-tokens.*--num-kv"
    ):
        runner.allocate(too_large)


def test_torch_takes_over_where_nothing_can_be_compiled(tiny, monkeypatch):
    def unavailable():
        raise BuildUnavailable("there is no compiler")

    monkeypatch.setattr(native_engine, "instruction_sets", unavailable)
    model = tiny("llama-mha")
    with structlog.testing.capture_logs() as logs:
        driver = Driver(make_runner(str(model.path), dtype="float32", threads=1, kernels="auto"))
    assert [(log["event"], log.get("reason")) for log in logs] == [
        ("native_kernels_unavailable", "there is no compiler"),
        ("model_loaded", None),
    ]
    assert logs[1]["kernels"] == "torch"
    assert driver.run([driver.admit(PROMPT)], 4) == [model.greedy(PROMPT, 4)]
    with pytest.raises(ModelError, match="native CPU kernels are not available: there is no compiler"):
        make_runner(str(model.path), kernels="native").load(lambda *call: None)
    monkeypatch.setattr(native_engine, "instruction_sets", lambda: ())
    with pytest.raises(ModelError, match="no AVX2"):
        make_runner(str(model.path), kernels="native").load(lambda *call: None)


@needs_native
def test_a_path_that_the_compiler_did_not_know_is_told(tiny, monkeypatch):
    monkeypatch.setattr(native_engine, "left_out_sets", lambda: (InstructionSet.AMX_BF16,))
    with structlog.testing.capture_logs() as logs:
        make_runner(str(tiny("llama-mha").path), threads=1, kernels="native").load(lambda *call: None)
    assert [(log["event"], log.get("path")) for log in logs] == [
        ("native_path_left_out", "amx_bf16"),
        ("model_loaded", None),
    ]
    assert logs[1]["kernels"] == f"native {SETS[0].lower()}"


@needs_native
def test_the_environment_chooses_the_kernels(tiny, monkeypatch):
    path = str(tiny("llama-mha").path)
    named = {"torch": "torch", "native": f"native {SETS[0].lower()}", "avx2": "native avx2"}
    for value, kernels in named.items():
        monkeypatch.setenv(KERNELS_ENV, value)
        with structlog.testing.capture_logs() as logs:
            make_runner(path, threads=1).load(lambda *call: None)
        assert logs[-1]["kernels"].startswith(kernels)
    monkeypatch.setenv(KERNELS_ENV, "fast")
    with pytest.raises(ModelError, match="kernels 'fast' do not exist; there are auto, native, torch, avx2, "):
        make_runner(path)
    missing = next((isa for isa in InstructionSet if isa.name not in SETS), None)
    if missing is not None:
        monkeypatch.setenv(KERNELS_ENV, missing.name.lower())
        with pytest.raises(ModelError, match=f"this CPU or the compiled library has no {missing.name}"):
            make_runner(path, threads=1).load(lambda *call: None)


@needs_native
def test_threads_are_tied_to_cores_if_asked(tiny):
    path, cores = str(tiny("llama-mha").path), os.sched_getaffinity(0)
    before = set(os.listdir("/proc/self/task"))
    runner = make_runner(path, threads=len(cores), pin_threads=True)
    with structlog.testing.capture_logs() as logs:
        runner.load(lambda *call: None)
    assert logs[-1]["pinned"]
    own = [os.sched_getaffinity(int(task)) for task in set(os.listdir("/proc/self/task")) - before]
    assert [core for core in sorted(cores) if {core} in own] == sorted(cores)
    assert os.sched_getaffinity(0) == cores, "the caller's own is left alone"
    with pytest.raises(OptionRefused, match=r"--pin-threads: .* --threads are 77 and this process may use"):
        make_runner(path, threads=77, pin_threads=True)
    with pytest.raises(ModelError, match="--pin-threads needs the native CPU kernels"):
        make_runner(path, kernels="torch", pin_threads=True).load(lambda *call: None)


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@needs_native
def test_a_missing_tensor_is_named(tiny, tmp_path, missing):
    source = tiny("llama-mha").path
    tensors = load_file(source / "model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ModelError, match=missing):
        make_runner(str(tmp_path), threads=1, kernels="native").load(lambda *call: None)
