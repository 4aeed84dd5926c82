"""Writes GGUF files of tiny models, as llama.cpp's converter would."""

import re

import gguf
import numpy as np
from safetensors.torch import load_file

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
EXPERT_NAMES = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"} | {
    f"{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN_NAMES = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
HEAD_ORDERED = ("llama", "smollm3")


def gguf_name(name, architecture):
    name = name.removeprefix("model.")
    fixed = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    if name in fixed or name == "lm_head.weight":
        return fixed.get(name, "output.weight")
    _, layer, *middle, kind = name.split(".")
    names = NAMES | {"mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp"}
    names |= OWN_NAMES.get(architecture, {})
    return f"blk.{layer}.{names['.'.join(middle)]}.{kind}"


def head_order(weight, num_heads):
    """What llama.cpp's converter does to q and k of Llama models."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def tensors_of(tiny_model, architecture):
    """The saved tensors, changed as the converter changes them; experts stacked under their GGUF names."""
    config, tensors, experts = tiny_model.model.config, {}, {}
    for name, tensor in load_file(tiny_model.path / "model.safetensors").items():
        values = tensor.float().numpy()
        expert = re.search(r"layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
        if expert:
            stack = experts.setdefault(f"blk.{expert[1]}.{EXPERT_NAMES[expert[3]]}.weight", {})
            stack[int(expert[2])] = values
            continue
        if architecture in HEAD_ORDERED and ("q_proj" in name or "k_proj" in name):
            num_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = head_order(values, num_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        tensors[name] = values
    stacks = {name: np.stack([stack[index] for index in sorted(stack)]) for name, stack in experts.items()}
    return tensors | stacks


def write_gguf(path, tiny_model, architecture, kind=TYPES.F32, extra=None, tensors_per_file=0):
    """Returns `path`; with `tensors_per_file` the files are beside it, named as the writer names parts."""
    config = tiny_model.model.config
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=tensors_per_file)
    if "add_block_count" not in [add for add, *_ in extra or ()]:
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
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for add, *values in extra or ():
        getattr(writer, add)(*values)
    for name, values in tensors_of(tiny_model, architecture).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = kind if values.ndim >= 2 else TYPES.F32
        file_name = name if name.startswith("blk.") else gguf_name(name, architecture)
        writer.add_tensor(file_name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
