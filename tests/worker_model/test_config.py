"""Configurations: what is read, and what is refused by name."""

import json

import pytest

from stepahead.kernels.reference.attention import LayerAttention
from stepahead.kernels.reference.rope import LinearScaling, Llama3Scaling, YarnScaling
from stepahead.worker.errors import ModelError, OptionRefused
from stepahead.worker.model.config import parse_config, read_config
from stepahead.worker.model.families import FAMILIES
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

NEEDED = {"num_key_value_heads": 2, **{name: size for name, size in LLAMA.items() if name != "model_type"}}


def parsed(**changes):
    return parse_config({**LLAMA, **changes}, {})


def test_defaults_of_a_bare_configuration():
    config = parsed()
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10_000.0)
    assert (config.rope.scaling, config.eos_token_ids, config.bos_token_id) == (None, (), None)


def test_rope_theta_of_old_and_new_files():
    assert parsed(rope_theta=5e5).rope.theta == 5e5
    assert parsed(rope_parameters={"rope_type": "default", "rope_theta": 1e5}).rope.theta == 1e5
    assert parsed(model_type="smollm3").rope.theta == 2e6


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


def windows(**changes):
    config = parsed(**changes)
    assert config.max_context_tokens == 512
    return [layer.window for layer in config.layers]


def test_which_layers_have_a_window():
    assert windows(model_type="mistral", sliding_window=128) == [128, 128]
    assert windows(model_type="mistral", sliding_window=None) == []
    assert windows(model_type="qwen2", sliding_window=128, use_sliding_window=False) == []
    used = {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}
    assert windows(**used) == []  # from layer 28 on
    assert windows(**used, max_window_layers=1) == [None, 128]
    assert windows(**used, layer_types=["sliding_attention", "full_attention"]) == [128, None]
    gemma = {"num_hidden_layers": 4, "sliding_window": 9}
    assert windows(model_type="gemma2", **gemma) == [9, None, 9, None]
    assert windows(model_type="gemma3_text", sliding_window_pattern=4, **gemma) == [9, 9, 9, None]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mistral", "sliding_window": -5}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": "wide"}, "sliding_window"),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_sizes_of_windows_are_positive(changes, field):
    with pytest.raises(ModelError, match=f"config.json: {field} must be a positive integer"):
        parsed(**changes)


def test_which_layers_turn():
    config = parsed(model_type="smollm3", num_hidden_layers=5)
    assert [layer.rope is not None for layer in config.layers] == [True, True, True, False, True]
    config = parsed(model_type="smollm3", no_rope_layers=[0, 1])
    assert [layer.rope is not None for layer in config.layers] == [False, True]


def test_rope_of_gemma_3_in_old_files():
    scaled = {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8}}
    config = parsed(model_type="gemma3_text", num_hidden_layers=6, head_dim=16, **scaled)
    local, full = config.layers[0].rope, config.layers[5].rope
    assert (local.theta, local.scaling) == (5e3, None)
    assert (full.theta, full.scaling) == (1e6, LinearScaling(factor=8.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_configurations_leave_out(model_type):
    """A configuration of defaults, as transformers saves and as it understands it."""
    import transformers

    theirs = transformers.AutoConfig.for_model(model_type)
    ours = parse_config({"model_type": model_type, **NEEDED, **json.loads(theirs.to_json_string())}, {})
    bare = parse_config({"model_type": model_type, **NEEDED}, {})
    sized = transformers.AutoConfig.for_model(model_type, **NEEDED)
    for config, original in ((ours, theirs), (bare, sized)):
        assert config.norm_eps == original.rms_norm_eps
        assert config.tied_embeddings == original.tie_word_embeddings
        assert config.num_kv_heads == original.num_key_value_heads
        head_dim = getattr(original, "head_dim", None) or original.hidden_size // original.num_attention_heads
        assert config.head_dim == head_dim
        assert config.attention_scale == getattr(original, "query_pre_attn_scalar", head_dim) ** -0.5
        assert config.attention_cap == getattr(original, "attn_logit_softcapping", None)
        assert config.logit_cap == getattr(original, "final_logit_softcapping", None)
        theta = original.rope_parameters.get("full_attention", original.rope_parameters)["rope_theta"]
        assert config.rope.theta == theta
        window = getattr(original, "sliding_window", None)
        kinds = getattr(original, "layer_types", None) or ["sliding_attention"] * original.num_hidden_layers
        expected = [window if kind == "sliding_attention" else None for kind in kinds]
        layers = config.layers or [LayerAttention(rope=config.rope)] * config.num_layers
        assert [layer.window for layer in layers] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "'gpt2' is not supported; supported are llama, mistral, mixtral, qwen2, qwen3, qwen3_moe",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' of llama is not supported; supported is silu"),
        (
            {"model_type": "gemma2", "hidden_activation": "silu"},
            "hidden_act 'silu' of gemma2 is not supported; supported is gelu_pytorch_tanh",
        ),
        ({"model_type": "gemma3"}, "gemma3 needs the object text_config"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias of mistral"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.1}, "1 of 16 elements must be an even part"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "needs the field short_factor"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "layer_types has 1",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "num_experts must be a positive integer"),
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
    (tmp_path / "model.safetensors").write_bytes(b"garbage and more of it")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load(tmp_path)


def test_specifications_that_name_nothing(tmp_path, monkeypatch):
    with pytest.raises(OptionRefused, match=r"--model .*a model is a directory"):
        load(tmp_path / "absent")
    with pytest.raises(OptionRefused, match=r"--model .*absent\.gguf: no such file"):
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
