"""How well SmolLM2 knows a text, in both engines and precisions, beside `transformers`."""

import os
from pathlib import Path

import pytest

from tests.untraced import untraced
from tests.worker_model.perplexity import GGUF_ENV, all_logits, measure

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(GGUF_ENV not in os.environ, reason=f"{GGUF_ENV} names no GGUF file"),
    # transformers warns about its own GGUF reading; what it computes is what is compared.
    pytest.mark.filterwarnings("default"),
]


def test_perplexity_is_that_of_transformers():
    with untraced():
        windows, computations = all_logits(Path(os.environ[GGUF_ENV]))
        qualities = measure(windows[:1], computations)
    original, theirs = qualities["transformers float32"], qualities["transformers bfloat16"]
    assert 15 < original.perplexity < 40  # a model that knows English, and does not know this text by heart
    for name, quality in qualities.items():
        if name.endswith("float32"):
            assert quality.divergence < 1e-8
            assert quality.perplexity == pytest.approx(original.perplexity, rel=1e-5)
        else:
            assert 1e-6 < quality.divergence < 1.5 * theirs.divergence
            assert quality.perplexity == pytest.approx(original.perplexity, rel=5e-3)
