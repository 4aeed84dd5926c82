"""Models with windows through the real stack, from pools that could not hold their sequences' full tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import stack as e2e

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

VOCAB_SIZE = 131
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 8,
    "tie_word_embeddings": False,
}
PROMPTS = [
    [(7 * key + 11 * index) % 120 + 5 for index in range(length)] for key, length in enumerate((70, 9, 33, 90))
]


@pytest.fixture(scope="module", params=["Mistral", "Gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Every layer with a window, and every other layer."""
    import torch
    import transformers

    torch.manual_seed(5)
    sizes = SIZES | ({"head_dim": 8} if request.param == "Gemma2" else {})
    config = getattr(transformers, f"{request.param}Config")(**sizes)
    path = tmp_path_factory.mktemp(request.param)
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(path)
    return request.param, path


async def test_v3_answers_from_a_small_pool_equal_those_from_a_large_one(model: tuple[str, Path]) -> None:
    """Mistral: 9 blocks of 4 for sequences of up to 30. Gemma 2: one sequence at a time in its full layers."""
    name, path = model
    messages = [e2e.request(prompt, 30) for prompt in PROMPTS]
    answers: list[list[list[int]]] = []
    for num_blocks in (9 if name == "Mistral" else 31, 512):
        worker = {"num_kv_blocks": num_blocks, "max_model_len": 124, "max_num_seqs": 4}
        async with e2e.serve(str(path), worker=worker) as stack:
            answered = await stack.answers(messages)
            assert all(answer.ok for answer in answered)
            answers.append([answer.token_ids for answer in answered])
            if name == "Mistral":
                (status,) = (await stack.status()).workers
                assert status.blocks.total == num_blocks
            await stack.assert_quiescent()
    assert answers[0] == answers[1]
    assert [len(tokens) > 2 for tokens in answers[0]] == [True] * 4
