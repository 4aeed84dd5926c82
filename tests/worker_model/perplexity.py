"""Perplexity of SmolLM2 in every precision and engine, beside `transformers` in float32.

    STEPAHEAD_TEST_SMOLLM2=FILE.gguf .venv/bin/python -m tests.worker_model.perplexity

The text is the beginning of H. G. Wells, The Time Machine (1895), in the public domain: chapters I and II, cut into
windows of 512 tokens that know nothing of each other. All but a window's first token count.
"""

import copy
import io
import os
import sys
import zipfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch

from stepahead.kernels.ops import StepLayout
from stepahead.worker.model.checkpoint import open_checkpoint
from stepahead.worker.model.cpu_runner import DTYPES
from stepahead.worker.model.native_engine import NativeEngine, native_instruction_set
from stepahead.worker.model.torch_engine import TorchEngine
from stepahead.worker.runner import CacheShape

GGUF_ENV = "STEPAHEAD_TEST_SMOLLM2"
TEXT = Path(__file__).with_name("time_machine.txt")
WINDOW = 512


@dataclass(frozen=True)
class Quality:
    """How well one computation of a model knows a text."""

    perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence, in nats per token, of the distributions from the first computation's."""


def read_gguf_with_transformers(path):
    """The model as `transformers` reads the file: its configuration, its names, its dequantised tensors."""
    # Not from_pretrained: for GGUF files that needs the accelerate package.
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
    model = LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def read_windows(checkpoint):
    """[num_windows, WINDOW] token ids of the text; what does not fill a window is left out."""
    archive = zipfile.ZipFile(io.BytesIO(checkpoint.tokenizer_bundle()))
    tokenizer = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    return np.array(ids[: len(ids) // WINDOW * WINDOW]).reshape(-1, WINDOW)


def engine_logits(engine):
    """Returns a function: a window -> its logits, [WINDOW, vocab_size]."""
    engine.allocate(
        CacheShape(
            num_slots=1,
            num_blocks=WINDOW // 16,
            block_size=16,
            max_model_len=WINDOW,
            max_num_batched_tokens=WINDOW,
            max_num_seqs=1,
        )
    )
    tokens = np.arange(WINDOW)
    layout = StepLayout(
        positions=tokens,
        slot_mapping=tokens,
        query_start_loc=np.array([0, WINDOW], np.int32),
        seq_lens=np.array([WINDOW], np.int32),
        block_tables=np.arange(WINDOW // 16, dtype=np.int32)[None],
    )
    return lambda window: engine.forward(window, layout, tokens).logits


def transformers_logits(model):
    """As `engine_logits`."""

    def logits(window):
        with torch.inference_mode():
            return model(torch.from_numpy(window)[None]).logits[0].float().numpy()

    return logits


def all_logits(path):
    """Computations by name, `transformers` in float32 first, and the windows."""
    with closing(open_checkpoint(str(path))) as checkpoint:
        windows = read_windows(checkpoint)
        original = read_gguf_with_transformers(path)
        computations = {"transformers float32": transformers_logits(original)}
        isa, reason = native_instruction_set()
        for name, dtype in DTYPES.items():
            arguments = (checkpoint.config, checkpoint.weights, dtype)
            threads = len(os.sched_getaffinity(0))
            computations[f"torch {name}"] = engine_logits(TorchEngine(*arguments, threads, lambda *call: None))
            if not reason:
                engine = NativeEngine(*arguments, isa, threads, lambda *call: None)
                computations[f"native {name}"] = engine_logits(engine)
    # Reading the file again would take some ten seconds.
    computations["transformers bfloat16"] = transformers_logits(copy.deepcopy(original).bfloat16())
    return windows, computations


def log_softmax(logits):
    """In float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def measure(windows, computations):
    """Quality of each computation by name; divergences are from the first's."""
    surprise = dict.fromkeys(computations, 0.0)
    divergence = dict.fromkeys(computations, 0.0)
    for window in windows:
        exact = None
        for name, logits in computations.items():
            logprobs = log_softmax(logits(window)[:-1])
            exact = logprobs if exact is None else exact
            surprise[name] -= logprobs[np.arange(len(window) - 1), window[1:]].mean()
            divergence[name] += (np.exp(exact) * (exact - logprobs)).sum(axis=1).mean()
    count = len(windows)
    return {name: Quality(float(np.exp(surprise[name] / count)), divergence[name] / count) for name in computations}


if __name__ == "__main__":
    all_windows, by_name = all_logits(Path(os.environ[GGUF_ENV]))
    sys.stdout.write(f"{all_windows.size} tokens in windows of {WINDOW}\n")
    for title, quality in measure(all_windows, by_name).items():
        sys.stdout.write(f"{title:24s} perplexity {quality.perplexity:8.4f}, KL {quality.divergence:.2e}\n")
