"""Configurations: what is read, and what is refused by name."""

import json

import pytest

from stepahead.kernels.reference.rope import LinearScaling, Llama3Scaling, YarnScaling
from stepahead.worker.errors import ModelError
from stepahead.worker.model.config import parse_config, read_config
from stepahead.worker.model.registry import make_runner

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def parsed(**changes):
    return parse_config({**LLAMA, **changes}, {})


def test_defaults_of_a_bare_configuration():
    config = parsed()
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10_000.0)
    assert (config.rope.scaling, config.eos_token_ids, config.bos_token_id) == (None, (), None)


def test_rope_theta_of_old_and_new_files():
    assert parsed(rope_theta=5e5).rope.theta == 5e5
    assert parsed(rope_parameters={"rope_type": "default", "rope_theta": 1e5}).rope.theta == 1e5
    assert parsed(model_type="qwen3").rope.theta == 1e6


def test_rope_scalings():
    assert parsed(rope_scaling={"type": "linear", "factor": 2}).rope.scaling == LinearScaling(factor=2.0)
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    assert parsed(rope_scaling={**llama3, "original_max_position_embeddings": 64}).rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=64
    )
    yarn = parsed(rope_parameters={"rope_type": "yarn", "factor": 4.0}).rope.scaling
    assert yarn == YarnScaling(factor=4.0, original_context_tokens=512)


def test_end_ids_come_from_the_generation_configuration_first():
    config = parse_config({**LLAMA, "eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": [7, 9]})
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 9), 1)
    assert parsed(eos_token_id=2).eos_token_ids == (2,)


def test_a_window_bounds_the_context():
    assert parsed(model_type="mistral", sliding_window=128).max_context_tokens == 128
    assert parsed(model_type="mistral", sliding_window=None).max_context_tokens == 512
    assert parsed(model_type="qwen2", sliding_window=128, use_sliding_window=False).max_context_tokens == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic' is not supported; supported are default",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs the field factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    ],
)
def test_unsupported_is_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        parsed(**changes)


def test_unreadable_files(tmp_path):
    with pytest.raises(ModelError, match=r"config.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        read_config(tmp_path)


def load(spec, **options):
    return make_runner(str(spec), **options).load(lambda *call: None)


def test_directory_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match=r"no model.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load(tmp_path)


def test_specifications_that_name_nothing(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="a model is a directory"):
        load(tmp_path / "absent")
    with pytest.raises(ModelError, match="no such file"):
        load(tmp_path / "absent.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"not a gguf file at all, but long enough to be read")
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        load(tmp_path / "broken.gguf")


def test_hub_id_without_a_network(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)

    def offline(*_args, **_options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("nothing cached\nand much more text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"hub model 'owner/name' is not in the local cache.*\(nothing cached\)"):
        load("owner/name")


def test_hub_id_resolves_to_its_snapshot(tiny, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    path = tiny("llama-mha").path
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_args, **_options: str(path))
    assert load("owner/name", threads=1).name == "owner/name"


def test_unknown_dtype():
    with pytest.raises(ModelError, match="dtype 'int4' is not supported; supported are auto, bfloat16, float32"):
        make_runner("anything", dtype="int4")
