"""Incremental decoding: rules K1, K4, K5, K8 and scenario BL-20."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.scheduler.text.codec import TextCodec
from stepahead.scheduler.text.detokenizer import IncrementalDetokenizer
from stepahead.scheduler.text.errors import DetokenizeError
from tests.scheduler.text.builders import CODECS, EMOJI, TOKENIZERS, byte_level, chunked

KINDS = sorted(CODECS)
REPLACEMENT = "\ufffd"


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Outputs over the whole vocabulary, a few ids beyond it included."""
    return st.lists(st.integers(0, CODECS[kind].vocab_size + 2), max_size=24)


def stream(codec: TextCodec, chunks: list[list[int]], *, skip: bool = True) -> list[str]:
    """Every delta, the final one last."""
    detokenizer = IncrementalDetokenizer(codec, skip_special_tokens=skip)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def byte_ids(kind: str, data: bytes) -> list[int]:
    """The byte tokens that spell `data`."""
    tokenizer = TOKENIZERS[kind]
    if kind == "byte_level":
        return [tokenizer.encode(chr(value)).ids[0] if value < 0x80 else _high_byte_id(value) for value in data]
    ids = [tokenizer.token_to_id(f"<0x{value:02X}>") for value in data]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


def _high_byte_id(value: int) -> int:
    # GPT-2's alphabet writes most bytes above 0x7F as the Latin-1 character itself, the others from U+0100 on.
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    char = chr(0x100 + hidden.index(value)) if value in hidden else chr(value)
    token_id = TOKENIZERS["byte_level"].token_to_id(char)
    assert token_id is not None
    return token_id


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_k1_streamed_text_equals_whole_text_for_every_chunking(kind: str, skip: bool, data: st.DataObject):
    chunks = data.draw(chunked(ids_of(kind)))
    whole = CODECS[kind].decode([i for chunk in chunks for i in chunk], skip_special_tokens=skip)
    assert "".join(stream(CODECS[kind], chunks, skip=skip)) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_k4_deltas_are_a_growing_prefix_of_every_continuation(kind: str, data: st.DataObject):
    ids, more = data.draw(ids_of(kind)), data.draw(ids_of(kind))
    detokenizer = IncrementalDetokenizer(CODECS[kind], skip_special_tokens=True)
    shown = "".join(detokenizer.push((token_id,)) for token_id in ids)
    assert CODECS[kind].decode([*ids, *more], skip_special_tokens=True).startswith(shown)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_whole_text_is_what_the_tokenizers_library_gives(kind: str, skip: bool, data: st.DataObject):
    ids = data.draw(ids_of(kind))
    expected = TOKENIZERS[kind].decode(ids, skip_special_tokens=skip)
    actual = CODECS[kind].decode(ids, skip_special_tokens=skip)
    if kind.startswith("byte_fallback") and REPLACEMENT in expected:
        # The library replaces every byte of a run that does not end well; ours keeps the good characters.
        assert REPLACEMENT in actual
        assert len(actual) <= len(expected)
    else:
        assert actual == expected


@given(raw=st.binary(max_size=12), cut=st.integers(0, 12))
def test_invalid_utf8_is_replaced_as_the_whole_decode_does(raw: bytes, cut: int):
    ids = byte_ids("byte_level", raw)
    expected = TOKENIZERS["byte_level"].decode(ids)
    assert "".join(stream(CODECS["byte_level"], [ids[:cut], ids[cut:]])) == expected
    assert expected == raw.decode("utf-8", "replace")


@given(raw=st.binary(max_size=12), text=st.text(max_size=4))
def test_k5_byte_fallback_loses_no_character_before_a_broken_one(raw: bytes, text: str):
    data = text.encode() + raw
    chunks = [[token_id] for token_id in byte_ids("byte_fallback", data)]
    assert "".join(stream(CODECS["byte_fallback"], chunks)) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bl20_a_split_emoji_is_held_until_complete(kind: str):
    chunks = [[token_id] for token_id in byte_ids(kind, EMOJI.encode())]
    assert stream(CODECS[kind], chunks) == ["", "", "", EMOJI, ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_bl20_an_unfinished_emoji_is_flushed_as_one_replacement(kind: str, num_bytes: int):
    ids = byte_ids(kind, b"ok" + EMOJI.encode()[:num_bytes])
    assert stream(CODECS[kind], [ids]) == ["ok", REPLACEMENT]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bl20_a_neighbour_streams_on_beside_a_broken_text(kind: str):
    broken = IncrementalDetokenizer(CODECS[kind], skip_special_tokens=True)
    neighbour = IncrementalDetokenizer(CODECS[kind], skip_special_tokens=True)
    seen: list[str] = []
    for bad, good in zip(byte_ids(kind, EMOJI.encode()[:3]), byte_ids(kind, b"abc"), strict=True):
        assert broken.push((bad,)) == ""
        seen.append(neighbour.push((good,)))
    assert broken.finish() == REPLACEMENT
    assert seen == ["a", "b", "c"]


def test_an_unfinished_character_is_closed_by_the_next_one():
    ids = byte_ids("byte_level", EMOJI.encode()[:2] + b"x")
    assert stream(CODECS["byte_level"], [[token_id] for token_id in ids]) == ["", "", REPLACEMENT + "x", ""]


def test_k5_prompt_bytes_never_leak():
    """A prompt that ends inside a character does not change the output: only outputs are pushed."""
    tail = byte_ids("byte_level", EMOJI.encode()[2:])
    assert "".join(stream(CODECS["byte_level"], [tail])) == REPLACEMENT * 2


@pytest.mark.parametrize(
    ("kind", "tokens", "text"),
    [
        ("byte_fallback_strip", ["▁hi", "▁hi"], "hi hi"),
        ("byte_fallback_strip", ["▁▁", "▁hi"], "  hi"),
        ("byte_fallback_strip", ["<0x20>", "▁hi"], " hi"),
        ("byte_fallback", ["▁hi", "▁hi"], " hi hi"),
        ("metaspace_always", ["<eos>", "▁hi", "▁hi"], "hi hi"),
        ("metaspace_never", ["▁hi", "▁hi"], " hi hi"),
        ("word_level", ["<eos>", "the", "cat"], "the cat"),
        ("word_piece", ["un", "##know", "##n", "."], "unknown."),
    ],
)
def test_leading_space_follows_the_first_token_with_text(kind: str, tokens: list[str], text: str):
    ids = [TOKENIZERS[kind].token_to_id(token) for token in tokens]
    chunks = [[token_id] for token_id in ids if token_id is not None]
    assert "".join(stream(CODECS[kind], chunks)) == text


def test_special_tokens_show_only_if_asked_for():
    codec = CODECS["word_level"]
    (eos_id,) = codec.special_token_ids
    assert codec.decode([1, eos_id, 2], skip_special_tokens=True) == "the cat"
    assert codec.decode([1, eos_id, 2], skip_special_tokens=False) == "the <eos> cat"


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, 1.5, "a", None])
def test_k8_what_is_no_id_is_refused_and_changes_nothing(bad: object):
    codec = TextCodec(byte_level())
    detokenizer = IncrementalDetokenizer(codec, skip_special_tokens=True)
    neighbour = IncrementalDetokenizer(codec, skip_special_tokens=True)
    letter = byte_ids("byte_level", b"a")
    assert detokenizer.push(letter) == "a"
    with pytest.raises(DetokenizeError, match="is not a token id"):
        detokenizer.push([*letter, bad])  # type: ignore[list-item]
    assert detokenizer.push(letter) == "a"
    assert neighbour.push(letter) == "a"


def test_the_text_kept_between_calls_is_bounded():
    detokenizer = IncrementalDetokenizer(CODECS["byte_level"], skip_special_tokens=True)
    ids = byte_ids("byte_level", b"\xf0\x9f\x98" * 500)
    shown = sum(len(detokenizer.push((token_id,))) for token_id in ids)
    assert shown == 499
    assert detokenizer.finish() == REPLACEMENT
