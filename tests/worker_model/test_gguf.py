"""GGUF files, written here by the `gguf` package, against the model they were made from."""

import gguf
import numpy as np
import pytest

from stepahead.worker.errors import ModelError
from stepahead.worker.model.gguf_checkpoint import hugging_face_name, undo_head_order
from stepahead.worker.model.registry import make_runner
from tests.worker_model.driver import Driver

TYPES = gguf.GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
PROMPT = np.random.default_rng(2).integers(3, 131, 15).tolist()


def gguf_name(name):
    name = name.removeprefix("model.")
    fixed = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    if name in fixed or name == "lm_head.weight":
        return fixed.get(name, "output.weight")
    _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(middle)]}.{kind}"


def head_order(weight, num_heads):
    """What llama.cpp's converter does to q and k of Llama models."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(path, tiny_model, architecture, kind=TYPES.F32, extra=None):
    model, config = tiny_model.model, tiny_model.model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for add, *values in extra or ():
        getattr(writer, add)(*values)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = head_order(
                values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        stored = kind if values.ndim == 2 else TYPES.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def driver_for(path):
    return Driver(make_runner(str(path), dtype="float32", threads=1))


@pytest.mark.parametrize(
    ("variant", "architecture"),
    [("llama-mha", "llama"), ("llama-gqa-tied", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_float32_gguf_is_the_model(tiny, tmp_path, variant, architecture):
    model = tiny(variant)
    driver = driver_for(write_gguf(tmp_path / "tiny.gguf", model, architecture))
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


@pytest.mark.parametrize("kind", [TYPES.Q4_K, TYPES.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_read_the_packages_own_values(kind):
    """The package cannot write these, so the values are checked against its reader on raw blocks."""
    from types import SimpleNamespace

    from stepahead.worker.model.gguf_checkpoint import GgufSource

    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 100, (4, size), dtype=np.uint8)
    tensor = SimpleNamespace(
        name="blk.0.ffn_up.weight", tensor_type=kind, data=raw, shape=np.array([block, 4]), n_bytes=raw.nbytes
    )
    source = GgufSource.__new__(GgufSource)
    source._tensors, source._heads_of = {"model.layers.0.mlp.up_proj.weight": tensor}, {}
    values, stored_bytes = source.read("model.layers.0.mlp.up_proj.weight")
    assert tuple(values.shape) == (4, block)
    assert stored_bytes == raw.nbytes
    np.testing.assert_array_equal(values.numpy(), gguf.quants.dequantize(raw, kind))


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
        ("gpt2", TYPES.F32, (), "general.architecture 'gpt2'"),
        ("llama", TYPES.F32, longrope, "rope.scaling.type 'longrope'"),
        ("llama", TYPES.F32, [("add_expert_count", 4)], "experts"),
        ("llama", TYPES.F32, [("add_rope_dimension_count", 4)], "rope.dimension_count 4"),
    ]
    for number, (architecture, kind, extra, message) in enumerate(cases):
        path = write_gguf(tmp_path / f"{number}.gguf", model, architecture, kind, extra)
        with pytest.raises(ModelError, match=message):
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
