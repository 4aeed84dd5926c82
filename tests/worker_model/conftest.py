"""Tiny random models, saved once per session as `transformers` saves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

VOCAB_SIZE = 131
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # the usual 0.02 makes a tiny model's logits too flat to tell anything
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
    "partial_rotary_factor": 0.5,
}
# Gemma's embeddings are large: a tiny tied model only repeats its last token. One variant is tied all the same.
GEMMA = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
VARIANTS = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mqa-head-dim": ("Llama", {"num_key_value_heads": 1, "head_dim": 12}),
    "llama-biases": ("Llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama-rope-linear": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LINEAR}),
    "llama-rope-yarn": ("Llama", {"num_key_value_heads": 2, "rope_parameters": YARN}),
    "llama-blocks": ("Llama", {"num_key_value_heads": 2, "intermediate_size": 64}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    # Windows smaller and larger than the 19 tokens that most tests feed.
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 7}),
    "mistral-wide-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 40}),
    "qwen2-window": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "gemma": ("Gemma", {**GEMMA, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {**GEMMA, "sliding_window": 8, "sliding_window_pattern": 2, "rope_parameters": GEMMA3_ROPE},
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 9}),
    "phi3-longrope": (
        "Phi3",
        {"num_key_value_heads": 2, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 5, "sliding_window": 7}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "num_experts": 6,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}
# As GGUF files can state them: Gemma's scale is that of the head size, its window pattern and SmolLM3's are fixed.
FILE_VARIANTS = {
    "gemma2-file": ("Gemma2", {**VARIANTS["gemma2"][1], "query_pre_attn_scalar": 16}),
    "gemma3-file": (
        "Gemma3",
        {
            **VARIANTS["gemma3"][1],
            "sliding_window_pattern": 6,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3-file": ("SmolLM3", {"num_key_value_heads": 2, "num_hidden_layers": 4}),
    "qwen3-moe-file": ("Qwen3Moe", {**VARIANTS["qwen3-moe"][1], "mlp_only_layers": []}),
}
MIXTURES = ("mixtral", "qwen3-moe")


@dataclass(frozen=True)
class TinyModel:
    """A saved model and its original."""

    path: Path
    model: torch.nn.Module

    def logits(self, token_ids):
        """[num_tokens, vocab_size] float32 of the original."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0].float().numpy()

    def greedy(self, prompt, num_outputs):
        """The original's greedy continuation, one full forward per token."""
        history = list(prompt)
        for _ in range(num_outputs):
            history.append(int(self.logits(history)[-1].argmax()))
        return history[len(prompt) :]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Returns a function: variant name -> TinyModel, made at first use."""
    import transformers

    made = {}

    def make(name):
        if name not in made:
            family, options = {**VARIANTS, **FILE_VARIANTS}[name]
            torch.manual_seed(len(name))
            text = "Text" if family == "Gemma3" else ""
            config = getattr(transformers, f"{family}{text}Config")(**{**BASE, **options})
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("bias", "norm.weight")):  # zeros and ones would hide a missing one
                    one = "norm" in parameter_name and not family.startswith("Gemma")  # whose weights are 1 + w
                    torch.nn.init.normal_(parameter, mean=1.0 if one else 0.0, std=0.3)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[name] = TinyModel(path, model)
        return made[name]

    return make
