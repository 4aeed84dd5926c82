"""One choice's text: rules K1, K2, K3, K5, K6, K8 and scenarios BL-16, BL-17, BL-20, BL-34."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.scheduler.text.choice_text import ChoiceText, TextStep
from stepahead.scheduler.text.codec import TextCodec
from stepahead.scheduler.text.errors import DetokenizeError
from tests.scheduler.text.builders import CODECS, EMOJI, chunked, plain_pieces
from tests.scheduler.text.test_detokenizer import byte_ids

BL16 = plain_pieces(["<unk>", "AB", "CDEF", "G"])
LETTERS = plain_pieces(["a", "b", "ab", "ba", "\n", "aab", "é"])


def grouped_outcome(choice: ChoiceText, chunks: list[list[int]]) -> tuple[str, str | None, int]:
    """(text, matched stop string, tokens of the output) of a choice fed in these groups."""
    text, num_tokens = "", 0
    for chunk in chunks:
        step = choice.push(chunk)
        text, num_tokens = text + step.text, num_tokens + step.tokens_used
        if step.matched_stop is not None:
            return text + choice.finish(), step.matched_stop, num_tokens
    return text + choice.finish(), None, num_tokens


def naive_outcome(
    codec: TextCodec, ids: list[int], stops: list[str], *, include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Decodes everything again after each token and searches all of it."""
    for num_tokens in range(1, len(ids) + 1):
        before = codec.decode(ids[: num_tokens - 1], skip_special_tokens=True)
        text = codec.decode(ids[:num_tokens], skip_special_tokens=True)
        found = [
            (begin, index)
            for index, stop in enumerate(stops)
            if (begin := text.find(stop, max(0, len(before) + 1 - len(stop)))) >= 0
        ]
        if found and num_tokens > min_tokens:
            begin, index = min(found)
            return text[: begin + len(stops[index]) * include], stops[index], num_tokens
    return codec.decode(ids, skip_special_tokens=True), None, len(ids)


@given(
    chunks=chunked(st.lists(st.integers(0, 6), max_size=12)),
    stops=st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_k1_k3_k6_every_grouping_gives_the_naive_outcome(
    chunks: list[list[int]], stops: list[str], include: bool, min_tokens: int
):
    ids = [token_id for chunk in chunks for token_id in chunk]
    choice = ChoiceText(LETTERS, stop_strings=stops, include_stop=include, min_tokens=min_tokens)
    expected = naive_outcome(LETTERS, ids, stops, include=include, min_tokens=min_tokens)
    assert grouped_outcome(choice, chunks) == expected


@pytest.mark.parametrize("kind", sorted(CODECS))
@given(data=st.data())
def test_k1_grouping_never_matters_for_any_tokenizer(kind: str, data: st.DataObject):
    codec = CODECS[kind]
    chunks = data.draw(chunked(st.lists(st.integers(0, codec.vocab_size), max_size=12)))
    stops = data.draw(st.lists(st.sampled_from(["a", " ", "ab", EMOJI, "\ufffd", "hi a", "the cat"]), max_size=2))
    singles = [[token_id] for chunk in chunks for token_id in chunk]
    grouped = grouped_outcome(ChoiceText(codec, stop_strings=stops), chunks)
    assert grouped == grouped_outcome(ChoiceText(codec, stop_strings=stops), singles)


@pytest.mark.parametrize("chunks", [[[1, 2, 3]], [[1], [2], [3]], [[1, 2], [3]], [[], [1], [2, 3]]])
@pytest.mark.parametrize(
    ("stops", "include", "text", "matched"),
    [
        (["BCD"], False, "A", "BCD"),
        (["BCD"], True, "ABCD", "BCD"),
        (["CD"], False, "AB", "CD"),
        (["CD"], True, "ABCD", "CD"),
        (["CD", "BCD"], False, "A", "BCD"),
        (["CD", "CDE"], True, "ABCD", "CD"),
        (["CDE", "CD"], True, "ABCDE", "CDE"),
    ],
)
def test_bl16_stop_string_inside_or_across_tokens(
    chunks: list[list[int]], stops: list[str], include: bool, text: str, matched: str
):
    choice = ChoiceText(BL16, stop_strings=stops, include_stop=include)
    assert grouped_outcome(choice, chunks) == (text, matched, 2)


def test_bl16_no_byte_of_the_stop_string_is_streamed():
    choice = ChoiceText(BL16, stop_strings=["BCD"])
    assert choice.push([1]) == TextStep("A", None, 1)
    assert choice.push([2, 3]) == TextStep("", "BCD", 1)
    assert choice.finish() == ""


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
def test_bl17_min_tokens_delays_stop_strings_to_an_exact_index(min_tokens: int):
    """The newline is output number 1, then 3 (from 0): the first at or after `min_tokens` ends the choice."""
    choice = ChoiceText(LETTERS, stop_strings=["\n"], min_tokens=min_tokens)
    expected = {0: ("a", "\n", 2), 1: ("a", "\n", 2), 2: ("a\nb", "\n", 4), 3: ("a\nb", "\n", 4)}
    outcome = grouped_outcome(choice, [[0, 4, 1, 4, 0]])
    assert outcome == expected.get(min_tokens, ("a\nb\na", None, 5))


def test_bl17_a_match_may_begin_among_the_first_tokens():
    choice = ChoiceText(LETTERS, stop_strings=["ab"], min_tokens=1)
    assert choice.push([0]) == TextStep("", None, 1)
    assert choice.push([1]) == TextStep("", "ab", 1)


def test_bl34_no_output_at_all_is_an_empty_text():
    """The stop token came first: the caller pushes nothing."""
    choice = ChoiceText(LETTERS, stop_strings=["a"])
    assert choice.push([]) == TextStep("", None, 0)
    assert choice.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bl20_text_held_for_a_stop_string_precedes_the_unfinished_character(kind: str):
    choice = ChoiceText(CODECS[kind], stop_strings=["ab!"])
    assert choice.push(byte_ids(kind, b"xab" + EMOJI.encode()[:3])) == TextStep("x", None, 6)
    assert choice.finish() == "ab\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_k3_a_stop_string_may_be_a_split_character(kind: str):
    choice = ChoiceText(CODECS[kind], stop_strings=[EMOJI])
    ids = byte_ids(kind, b"x" + EMOJI.encode() + b"y")
    assert choice.push(ids) == TextStep("x", EMOJI, 5)


def test_without_stop_strings_all_tokens_are_used_at_once():
    choice = ChoiceText(BL16)
    assert choice.push([1, 2, 3]) == TextStep("ABCDEFG", None, 3)
    assert choice.finish() == ""


@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_k8_a_bad_id_ends_one_choice_only(stops: list[str]):
    broken, neighbour = (ChoiceText(BL16, stop_strings=stops) for _ in range(2))
    with pytest.raises(DetokenizeError):
        broken.push([1, -1])
    assert neighbour.push([1, 2]) == TextStep("ABCDEF", None, 2)
