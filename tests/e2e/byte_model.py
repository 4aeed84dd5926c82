"""A tiny random Llama whose tokens are bytes, saved as `transformers` saves one: it can write every text."""

from __future__ import annotations

from pathlib import Path

EOS = 257
VOCAB_SIZE = 264
"""256 bytes, beginning, end, and ids that the tokenizer does not know."""
BYTE = {chr(value): value for value in range(256)}


def save_byte_model(path: Path) -> Path:
    """Writes config, weights (float32, sharp enough to have opinions) and tokenizer into a folder."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=256,
        eos_token_id=EOS,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The byte-level alphabet spells bytes as letters; ids follow the bytes, not the letters.
    tokenizer = Tokenizer(models.BPE(vocab={_letter_of(value): value for value in range(256)}, merges=[]))
    assert set(letters) == {_letter_of(value) for value in range(256)}
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])  # type: ignore[arg-type]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(path)
    return path


def _letter_of(value: int) -> str:
    """The letter of a byte in GPT-2's alphabet: printable bytes are themselves, the rest follows from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if value in printable:
        return chr(value)
    return chr(256 + [other for other in range(256) if other not in printable].index(value))
