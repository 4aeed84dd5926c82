"""SmolLM2 against `transformers`: the same greedy tokens in float32, through mixed batches."""

import io
import json
import os
import zipfile
from pathlib import Path

import pytest
import tokenizers
import torch

from stepahead.worker.model.registry import make_runner
from tests.worker_model.driver import Driver
from tests.worker_model.perplexity import GGUF_ENV, read_gguf_with_transformers

NUM_OUTPUTS = 64

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(GGUF_ENV not in os.environ, reason=f"{GGUF_ENV} names no GGUF file"),
    # transformers warns about its own GGUF reading; what it computes is what is compared.
    pytest.mark.filterwarnings("default"),
]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1 2 3 4 5 6",
    "The three primary colours are",
    "In 1969, the first human",
    "A recipe for pancakes: first,",
    "Dear Sir or Madam,",
    "The theory of relativity says that",
    "Why is the sky blue?",
    "import numpy as np\n\ndef mean(values):",
    "She opened the door and",
    "The opposite of hot is",
    "Il était une fois",
    "List of planets:\n1. Mercury\n2.",
    "To be, or not to be,",
    "The stock market",
    "What is 12 times 12?",
    "My favourite animal is the",
]


@pytest.fixture(scope="module")
def path():
    return Path(os.environ[GGUF_ENV])


@pytest.fixture(scope="module")
def original(path):
    return read_gguf_with_transformers(path)


@pytest.fixture(scope="module")
def driver(path):
    runner = make_runner(str(path), dtype="float32")
    return Driver(runner, num_slots=32, num_blocks=256, block_size=16, max_model_len=160, seed=1)


@pytest.fixture(scope="module")
def tokenizer(driver):
    archive = zipfile.ZipFile(io.BytesIO(driver.facts.tokenizer_bundle))
    assert json.loads(archive.read("bundle.json"))["eos_token_ids"] == [2]
    return tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())


def generated(model, prompt):
    """`generate` without an end token, so that every prompt gives all its outputs."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_OUTPUTS,
            min_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def greedy_choices(model, prompt, outputs):
    """The original's largest logit after the prompt and after each output but the last.

    If these are the outputs, the outputs are its greedy continuation: by induction, each follows from those before.
    One forward instead of 64.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + outputs[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_greedy_tokens_equal_transformers(driver, tokenizer, original):
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    seqs = [driver.admit(prompt) for prompt in prompts[:5]]
    for prompt in prompts[5:]:  # one arrival a step: chunks and decode rows of all lengths share steps
        driver.step([(seq, min(3, len(seq.prompt) - seq.num_fed) if not seq.decoding else 1) for seq in seqs])
        seqs.append(driver.admit(prompt))
    driver.run(seqs, NUM_OUTPUTS, chunk=3)
    for seq in seqs:
        outputs = seq.outputs[:NUM_OUTPUTS]
        assert len(outputs) == NUM_OUTPUTS
        assert greedy_choices(original, seq.prompt, outputs) == outputs
    for seq in seqs[:2]:
        assert generated(original, seq.prompt) == seq.outputs[:NUM_OUTPUTS]


def test_tokenizer_splits_digits_as_trained(tokenizer):
    assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("The answer is\t42.").ids) == "The answer is\t42."
