"""GGUF files, written here by the `gguf` package, against the model they were made from."""

import gguf
import numpy as np
import pytest

from stepahead.worker.errors import ModelError
from stepahead.worker.model.gguf_checkpoint import GgufSource, hugging_face_name, undo_head_order
from stepahead.worker.model.gguf_config import GgufMetadata
from stepahead.worker.model.gguf_reader import PlainReader
from stepahead.worker.model.registry import make_runner
from tests.worker_model import gguf_reference
from tests.worker_model.driver import Driver
from tests.worker_model.gguf_files import TYPES, head_order, write_gguf

PROMPT = np.random.default_rng(2).integers(3, 131, 20).tolist()


def driver_for(path):
    return Driver(make_runner(str(path), dtype="float32", threads=1))


GEMMA_KEYS = [("add_sliding_window", 8)]
CAPS = [("add_attn_logit_softcapping", 3.0), ("add_final_logit_softcapping", 8.0)]
LOCAL_BASE = [("add_rope_freq_base_swa", 100.0)]
LINEAR_2 = [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 2.0)]
LONGROPE = [
    ("add_rope_dimension_count", 4),
    ("add_rope_scaling_orig_ctx_len", 16),
    ("add_rope_scaling_attn_factors", float(np.sqrt(1 + np.log(8) / np.log(16)))),
    ("add_tensor", "rope_factors_short.weight", np.array([1.0, 1.5], np.float32)),
    ("add_tensor", "rope_factors_long.weight", np.array([2.0, 5.0], np.float32)),
]
EXPERTS = [("add_expert_used_count", 2), ("add_sliding_window", 7), ("add_expert_count", 5)]
QWEN_EXPERTS = [("add_expert_used_count", 2), ("add_expert_count", 6), ("add_expert_feed_forward_length", 24)]
# variant, architecture, what the converter writes of it beside the sizes
FAMILY_FILES = [
    ("llama-mha", "llama", []),
    ("llama-gqa-tied", "llama", []),
    ("mistral-window", "llama", [("add_sliding_window", 7)]),
    ("qwen2", "qwen2", []),
    ("qwen3", "qwen3", []),
    ("smollm3-file", "smollm3", []),
    ("gemma", "gemma", []),
    ("gemma2-file", "gemma2", GEMMA_KEYS + CAPS),
    ("gemma3-file", "gemma3", GEMMA_KEYS + LOCAL_BASE + LINEAR_2),
    ("phi3", "phi3", [("add_sliding_window", 9)]),
    ("phi3-longrope", "phi3", [("add_sliding_window", 0), *LONGROPE]),
    ("mixtral", "llama", EXPERTS),
    ("qwen3-moe-file", "qwen3moe", QWEN_EXPERTS),
]


@pytest.mark.parametrize(("variant", "architecture", "extra"), FAMILY_FILES)
def test_float32_gguf_is_the_model(tiny, tmp_path, variant, architecture, extra):
    model = tiny(variant)
    driver = driver_for(write_gguf(tmp_path / "tiny.gguf", model, architecture, extra=extra))
    driver.run([driver.admit(PROMPT)], 1, chunk=6)
    np.testing.assert_allclose(driver.runner._logits.logits[0], model.logits(PROMPT)[-1], atol=1e-3)
    assert (driver.facts.name, driver.facts.eos_token_ids, driver.facts.bos_token_id) == ("tiny", (2,), 1)
    assert driver.facts.tokenizer_bundle == b""


@pytest.mark.parametrize(
    "kind", [TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1], ids=lambda kind: kind.name
)
def test_stored_types_are_dequantised(tiny, tmp_path, kind):
    # The other variants' rows of 48 do not fill blocks of 32.
    model = tiny("llama-blocks")
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", kind)
    source = make_runner(str(path), dtype="float32", threads=1)
    driver = Driver(source)
    driver.run([driver.admit(PROMPT)], 1)
    tolerance = {"F16": 0.02, "BF16": 0.1, "Q8_0": 0.1}.get(kind.name, 1.0)
    error = driver.runner._logits.logits[0] - model.logits(PROMPT)[-1]
    assert np.sqrt((error**2).mean()) < tolerance * model.logits(PROMPT)[-1].std()


@pytest.mark.parametrize("name", gguf_reference.BLOCKS)
def test_each_type_against_the_formats_description(tmp_path, name):
    """A file with any bits in it, an expert stack among them; read as the loader reads it."""
    rng = np.random.default_rng(len(name))
    rows = gguf_reference.random_rows(name, 6, 2, rng)
    writer = gguf.GGUFWriter(str(tmp_path / "bits.gguf"), "llama")
    writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=TYPES[name])
    writer.add_tensor("blk.0.ffn_up_exps.weight", rows.reshape(3, 2, -1), raw_dtype=TYPES[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource({tmp_path / "bits.gguf": PlainReader(tmp_path / "bits.gguf")}, "llama", {})
    expected = gguf_reference.dequantised(name, rows)
    values, stored_bytes = source.read("model.layers.0.mlp.up_proj.weight")
    assert stored_bytes == rows.nbytes
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    values, stored_bytes = source.read("model.layers.0.mlp.experts.1.up_proj.weight")
    assert stored_bytes == rows.nbytes // 3
    np.testing.assert_allclose(values.numpy(), expected[2:4], rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    with pytest.raises(ModelError, match="has no expert 3"):
        source.read("model.layers.0.mlp.experts.3.up_proj.weight")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_round_trip_of_each_type_that_the_package_writes(name):
    """Half a step of a block's scale, and float16's rounding of it, is all that is lost."""
    values = np.random.default_rng(3).normal(size=(5, 64)).astype(np.float32)
    read = gguf_reference.dequantised(name, gguf.quants.quantize(values, TYPES[name]))
    blocks = values.reshape(5, 2, 32)
    levels = {"Q8_0": 127, "Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31}[name]
    span = np.ptp(blocks, axis=-1) if name.endswith("1") else np.abs(blocks).max(-1)
    # Q4_0 and Q5_0 reach one step less far on the side of the smaller extreme.
    steps = 1.001 if name in ("Q4_0", "Q5_0") else 0.51
    assert (np.abs(read.reshape(5, 2, 32) - blocks) <= steps * span[..., None] / levels + 2e-3).all()


def test_mixtrals_first_files_have_a_tensor_per_expert():
    assert hugging_face_name("blk.3.ffn_gate.5.weight") == "model.layers.3.mlp.experts.5.gate_proj.weight"


def test_a_directory_with_one_gguf_file(tiny, tmp_path):
    model = tiny("llama-mha")
    write_gguf(tmp_path / "one.gguf", model, "llama")
    assert driver_for(tmp_path).facts.name == "one"
    write_gguf(tmp_path / "two.gguf", model, "llama")
    with pytest.raises(ModelError, match=r"several GGUF models; name one: one.gguf, two.gguf"):
        driver_for(tmp_path)


def test_the_largest_gemmas_scale_by_another_size(tiny, tmp_path):
    """No key says so: llama.cpp knows them by their number of layers."""
    model = tiny("gemma2-file")
    for num_layers, scored in ((42, 16), (46, 8)):  # head size, hidden size / heads
        path = write_gguf(tmp_path / f"{num_layers}.gguf", model, "gemma2", extra=[("add_block_count", num_layers)])
        assert GgufMetadata(PlainReader(path)).config().attention_scale == scored**-0.5


def test_what_gemma_2_files_leave_out(tiny, tmp_path):
    path = write_gguf(tmp_path / "old.gguf", tiny("gemma2-file"), "gemma2")
    config = GgufMetadata(PlainReader(path)).config()
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    assert [layer.window for layer in config.layers] == [4096, None, 4096]


def test_a_window_pattern_that_is_stated(tiny, tmp_path):
    extra = [("add_sliding_window", 8), ("add_sliding_window_pattern", [True, False, False])]
    path = write_gguf(tmp_path / "tiny.gguf", tiny("gemma3"), "gemma3", extra=extra)
    config = GgufMetadata(PlainReader(path)).config()
    assert [layer.window for layer in config.layers] == [8, None, None]
    assert [layer.rope.theta for layer in config.layers] == [10_000.0, 5000.0, 5000.0]


def test_rope_divisors_and_scaling_keys(tiny, tmp_path):
    model = tiny("llama-rope-linear")
    scaled = [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 2.0)]
    divisors = [("add_tensor", "rope_freqs.weight", np.full(4, 2.0, np.float32))]
    for name, extra in (("keys.gguf", scaled), ("tensor.gguf", divisors)):
        driver = driver_for(write_gguf(tmp_path / name, model, "llama", extra=extra))
        driver.run([driver.admit(PROMPT)], 1)
        np.testing.assert_allclose(driver.runner._logits.logits[0], model.logits(PROMPT)[-1], atol=1e-3)


def test_unsupported_is_refused_by_name(tiny, tmp_path):
    model = tiny("llama-mha")
    longrope = [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE), ("add_rope_scaling_factor", 2.0)]
    cases = [
        ("gpt2", TYPES.F32, (), "general.architecture 'gpt2' is not supported; supported are llama, qwen2, "),
        ("llama", TYPES.F32, longrope, "rope.scaling.type 'longrope'"),
        ("qwen2", TYPES.F32, [("add_expert_count", 4)], "qwen2.expert_count: supported are Mixtral and Qwen3-MoE"),
        (
            "llama",
            TYPES.F32,
            [("add_uint16", "split.count", 3)],
            r"it is part 1 of 3 \(split.no, split.count\); it is read as part 1 of 1: .* NAME-00001-of-00003.gguf",
        ),
        ("llama", TYPES.F32, [("add_rope_dimension_count", 4)], "rope.dimension_count 4"),
    ]
    for number, (architecture, kind, extra, message) in enumerate(cases):
        path = write_gguf(tmp_path / f"{number}.gguf", model, architecture, kind, extra)
        with pytest.raises(ModelError, match=message):
            make_runner(str(path)).load(lambda *call: None)


@pytest.fixture
def split(tiny, tmp_path):
    """Returns (the model, its files): a mixture, so that a file begins inside a layer."""
    model = tiny("mixtral")
    write_gguf(tmp_path / "tiny.gguf", model, "llama", extra=EXPERTS, tensors_per_file=12)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [f"tiny-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return model, files


def test_a_model_in_several_files_by_its_first_and_by_directory(split):
    model, files = split
    for spec in (files[0], files[0].parent):
        driver = driver_for(spec)
        driver.run([driver.admit(PROMPT)], 1, chunk=6)
        np.testing.assert_allclose(driver.runner._logits.logits[0], model.logits(PROMPT)[-1], atol=1e-3)
        assert driver.facts.name == "tiny"


def test_files_of_a_split_model_that_do_not_fit_are_told(split):
    _, files = split

    def refused(spec, message):
        with pytest.raises(ModelError, match=message):
            make_runner(str(spec)).load(lambda *call: None)

    refused(files[1], "tiny-00002-of-00003.gguf is part 2 of a model in 3 files; name the first")
    swapped = files[1].rename(files[0].parent / "held")
    files[2].rename(files[1])
    refused(files[0], "of the model's 3 files tiny-00003-of-00003.gguf are missing beside it")
    swapped.rename(files[2])
    refused(files[0], "tiny-00002-of-00003.gguf says that it is part 3 of 3 .*; it is read as part 2 of 3")
    files[0].unlink()
    files[1].unlink()
    refused(
        files[0].parent, "of the model's 3 files tiny-00001-of-00003.gguf, tiny-00002-of-00003.gguf are missing"
    )


def test_a_split_model_that_lacks_tensors_is_told(tiny, tmp_path):
    extra = [("add_uint16", "split.count", 1), ("add_int32", "split.tensors.count", 40)]
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama-mha"), "llama", extra=extra)
    with pytest.raises(ModelError, match=r"speaks of 40 tensors \(split.tensors.count\), its files hold 30"):
        make_runner(str(path)).load(lambda *call: None)


def test_end_of_turn_ids_end_too(tiny, tmp_path):
    extra = [("add_eot_token_id", 9), ("add_eom_token_id", 2)]
    driver = driver_for(write_gguf(tmp_path / "tiny.gguf", tiny("llama-mha"), "llama", extra=extra))
    assert driver.facts.eos_token_ids == (2, 9)


def test_head_order_is_undone():
    weight = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
    assert (undo_head_order(head_order(weight, 3), 3) == weight).all()
    assert (undo_head_order(head_order(weight[:, 0], 3), 3) == weight[:, 0]).all()


def test_names():
    assert hugging_face_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    assert hugging_face_name("rope_freqs.weight") == "rope_freqs.weight"
