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
}


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
            family, options = VARIANTS[name]
            torch.manual_seed(len(name))
            config = getattr(transformers, f"{family}Config")(**{**BASE, **options})
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("bias", "norm.weight")):  # zeros and ones would hide a missing one
                    torch.nn.init.normal_(parameter, mean=1.0 if "norm" in parameter_name else 0.0, std=0.3)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[name] = TinyModel(path, model)
        return made[name]

    return make
