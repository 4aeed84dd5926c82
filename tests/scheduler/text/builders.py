"""Small tokenizers of every kind that language models use, and bundles made of them."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from stepahead.scheduler.text.codec import TextCodec

EOS = "<eos>"
EMOJI = "😀"


def byte_level() -> Tokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): 256 byte tokens, some merges that cut characters in half."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    # "ðŁ" is the first half of an emoji, "Ġb" a space and a letter, "©a" the second half of é and a letter.
    merges = [("ð", "Ł"), ("Ġ", "b"), ("a", "b"), ("ab", "c"), ("©", "a"), ("Ã", "©")]
    vocab = {token: index for index, token in enumerate([*tokens, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True), AddedToken("<bos>", special=True)])
    # Outside the byte alphabet (a space), inside it (é), and a multi-byte one.
    tokenizer.add_tokens([AddedToken("two words", special=False), AddedToken("日本", special=False)])
    return tokenizer


def _sentencepiece_vocab() -> dict[str, int]:
    words = ["<unk>", "▁", "▁hi", "▁a", "b", "ab", "▁▁", "é", "hi", "c", "�"]
    return {token: index for index, token in enumerate([*words, *(f"<0x{value:02X}>" for value in range(256))])}


def byte_fallback(*, strip: bool) -> Tokenizer:
    """SentencePiece BPE with byte tokens, as Llama 2 (`strip`) and Gemma (no `strip`) have it."""
    model = models.BPE(vocab=_sentencepiece_vocab(), merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def metaspace(*, scheme: str) -> Tokenizer:
    """SentencePiece unigram with a Metaspace decoder (T5, XLM-R)."""
    vocab = [(token, -float(index)) for index, token in enumerate(_sentencepiece_vocab())]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words and no decoder at all: tokens are joined with spaces."""
    words = ["<unk>", "the", "cat", "é", EMOJI, "AB", "CDEF", "G", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece (BERT): continuation tokens and spaces before punctuation that decoding removes."""
    words = ["[UNK]", "un", "##know", "##n", ".", "'", "s", "do", "not", "##", "é"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def rewriting() -> Tokenizer:
    """A decoder of several steps per token: a pattern, then stripping of each token's beginning."""
    words = ["<unk>", "__a_", "_", "b__c", "d12e345", "é", "__", "a"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    stages = [decoders.Replace(Regex("[0-9]+"), "#"), decoders.Strip("_", 1, 0), decoders.Strip("a", 1, 0)]
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def plain_pieces(pieces: Sequence[str]) -> TextCodec:
    """A tokenizer whose token `i` is the text `pieces[i]`, joined without anything between."""
    tokenizer = Tokenizer(
        models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=pieces[0])
    )
    tokenizer.decoder = decoders.Fuse()
    return TextCodec(tokenizer)


def all_kinds() -> Iterator[tuple[str, Tokenizer]]:
    """Every tokenizer above, by name."""
    yield "byte_level", byte_level()
    yield "byte_fallback", byte_fallback(strip=False)
    yield "byte_fallback_strip", byte_fallback(strip=True)
    yield "metaspace_always", metaspace(scheme="always")
    yield "metaspace_never", metaspace(scheme="never")
    yield "word_level", word_level()
    yield "word_piece", word_piece()
    yield "rewriting", rewriting()


TOKENIZERS: Mapping[str, Tokenizer] = dict(all_kinds())
CODECS: Mapping[str, TextCodec] = {name: TextCodec(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Adds the post-processor that puts `<bos>` before a text."""
    bos_id = tokenizer.token_to_id("<bos>")
    assert bos_id is not None
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos_id)]
    )
    return tokenizer


def bundle_bytes(entries: Mapping[str, str | bytes]) -> bytes:
    """A zip archive with these entries."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def bundle_entries(
    tokenizer: Tokenizer, fields: Mapping[str, object], template: str | None = None
) -> dict[str, str]:
    """The entries of a correct bundle."""
    entries = {"tokenizer.json": tokenizer.to_str(), "bundle.json": json.dumps(fields)}
    if template is not None:
        entries["chat_template.jinja"] = template
    return entries


@st.composite
def chunked(draw: st.DrawFn, items: st.SearchStrategy[list[int]]) -> list[list[int]]:
    """A list cut into chunks, empty ones included; every chunking can come out."""
    whole = draw(items)
    cuts = draw(st.lists(st.integers(0, len(whole)), max_size=6).map(sorted))
    return [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
