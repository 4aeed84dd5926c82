"""Masks and matchers: rules I1, I2, I4, I5 and I7."""

from __future__ import annotations

import json
import random

import pytest

from stepahead.scheduler.constraints.engine import Engine
from stepahead.scheduler.constraints.errors import (
    ConstraintUnsupported,
    MatcherFailed,
    NothingAllowed,
    TokenRejected,
)
from stepahead.scheduler.constraints.matcher import MaskPool
from stepahead.scheduler.constraints.spec import ConstraintKind, ConstraintSpec
from stepahead.scheduler.constraints.token_table import TokenTable, token_table
from tests.scheduler.constraints.builders import (
    CODEC,
    TABLE,
    VOCAB_SIZE,
    allowed_ids,
    fallback_codec,
    matcher,
    schema_spec,
    takes,
    text_of,
    walk,
)
from tests.scheduler.text.builders import CODECS

CHOICES = ConstraintSpec(ConstraintKind.CHOICES, ("ab", "abc", 'é\x7f😀"\\\n', "ab"))
OBJECT = ConstraintSpec(ConstraintKind.JSON_OBJECT)


def ids(text: str) -> list[int]:
    return CODEC.encode(text)


def test_i2_a_mask_covers_the_logits_and_nothing_but_text():
    mask = matcher(ConstraintSpec(ConstraintKind.REGEX, ("(?s:.)*",))).mask()
    assert len(mask) == (VOCAB_SIZE + 7) // 8
    for token_id in allowed_ids(mask):
        assert TABLE.pieces[token_id] or token_id in TABLE.eos_ids
    # Special ids, ids behind the vocabulary, and the padding of the last byte.
    assert max(allowed_ids(mask)) < CODEC.vocab_size
    assert CODEC.special_token_ids.isdisjoint(set(allowed_ids(mask)) - set(TABLE.eos_ids))


def test_i2_a_mask_allows_exactly_what_is_accepted():
    position = matcher(CHOICES)
    for token_id in [*ids("a"), *ids("b")]:
        expected = [index for index in range(VOCAB_SIZE) if position.fork().accept(index)]
        assert allowed_ids(position.mask()) == expected
        assert position.accept(token_id)


def test_i4_ends_are_allowed_exactly_where_the_grammar_accepts():
    position = matcher(CHOICES)
    assert not position.allows_end
    assert not set(TABLE.eos_ids) & set(allowed_ids(position.mask()))
    position.replay(ids("ab"))
    assert position.allows_end
    assert set(TABLE.eos_ids) <= set(allowed_ids(position.mask()))
    assert not position.is_finished
    position.replay(ids("c"))
    assert position.is_finished
    assert allowed_ids(position.mask()) == sorted(TABLE.eos_ids)


def test_i4_nothing_is_accepted_after_the_end():
    for eos_id in TABLE.eos_ids:
        position = matcher(CHOICES)
        assert not position.fork().accept(eos_id)
        position.replay([*ids("ab"), eos_id])
        assert position.has_ended
        for token_id in [*ids("c"), *TABLE.eos_ids]:
            assert not position.accept(token_id)
        assert position.has_ended
        with pytest.raises(NothingAllowed):
            position.mask()


def test_i5_a_token_that_does_not_fit_is_reported_and_final():
    for bad in [*ids("x"), VOCAB_SIZE, VOCAB_SIZE - 1, -1, *TABLE.eos_ids]:
        position = matcher(CHOICES)
        assert not position.accept(bad)
    with pytest.raises(TokenRejected) as caught:
        matcher(CHOICES).replay(ids("a") + ids("x"))
    assert (caught.value.index, caught.value.token_id) == (1, ids("x")[0])


def test_i2_an_engine_in_error_never_gives_a_mask():
    position = matcher(CHOICES)
    assert not position.accept(ids("x")[0])
    with pytest.raises(MatcherFailed):
        position.mask()
    assert not position.allows_end


def test_i7_a_mask_that_allows_nothing_is_reported():
    # This tokenizer cannot write an "a".
    table = TokenTable((b"b", b"c", b""), (2,))
    with pytest.raises(NothingAllowed):
        matcher(ConstraintSpec(ConstraintKind.REGEX, ("a",)), Engine(table)).mask()
    position = matcher(CHOICES)
    position.replay(ids("abc"))
    assert allowed_ids(position.mask()) == sorted(TABLE.eos_ids)
    with pytest.raises((NothingAllowed, MatcherFailed)):
        matcher(schema_spec({"$ref": "#"})).mask()


def test_i1_a_replay_gives_the_masks_of_the_first_time():
    position, tokens, masks = matcher(OBJECT), [], []
    rng = random.Random(5)
    for _ in range(40):
        masks.append(position.mask())
        tokens.append(rng.choice([i for i in allowed_ids(masks[-1]) if i not in TABLE.eos_ids]))
        assert position.accept(tokens[-1])
        if position.is_finished:
            break
    for cut in range(len(tokens)):
        again = matcher(OBJECT)
        again.replay(tokens[:cut])
        assert again.mask() == masks[cut]


def test_forks_go_their_own_ways():
    position = matcher(CHOICES)
    position.replay(ids("a"))
    fork = position.fork()
    position.replay(ids("bc"))
    assert not fork.is_finished
    fork.replay([*ids("b"), TABLE.eos_ids[0]])
    assert fork.has_ended
    assert not position.has_ended
    assert fork.fork().has_ended


def test_a_pool_fills_what_each_matcher_would_and_fails_rows_alone():
    broken, ended, done = matcher(CHOICES), matcher(CHOICES), matcher(CHOICES)
    assert not broken.accept(ids("x")[0])
    ended.replay([*ids("ab"), TABLE.eos_ids[0]])
    done.replay(ids("abc"))
    fresh = [matcher(CHOICES), matcher(OBJECT)]
    masks = MaskPool(2).fill_masks([broken, fresh[0], ended, done, fresh[1]])
    assert isinstance(masks[0], MatcherFailed)
    assert isinstance(masks[2], NothingAllowed)
    assert masks[1] == matcher(CHOICES).mask()
    assert allowed_ids(masks[3]) == sorted(TABLE.eos_ids)
    assert masks[4] == matcher(OBJECT).mask()
    assert MaskPool(1).fill_masks([]) == []


def test_byte_fallback_tokenizers_write_the_same_text_in_several_ways():
    codec = fallback_codec()
    table = token_table(codec, codec.vocab_size)
    spec = ConstraintSpec(ConstraintKind.CHOICES, ("é hi", "日"))
    texts = {text_of(walk(matcher(spec, Engine(table)), seed, table=table), table) for seed in range(20)}
    assert texts == {"é hi", "日"}
    first = [table.pieces[index] for index in allowed_ids(matcher(spec, Engine(table)).mask())]
    assert sorted(first) == [b"\xc3", b"\xc3\xa9", b"\xe6"]


def test_tokenizers_that_cannot_be_constrained_are_refused():
    with pytest.raises(ConstraintUnsupported, match="fewer"):
        token_table(CODEC, CODEC.vocab_size - 1)
    with pytest.raises(ConstraintUnsupported, match="end-of-text"):
        token_table(CODECS["byte_level"], 300)
    assert fallback_codec().special_token_ids


CASES = [
    (ConstraintSpec(ConstraintKind.REGEX, (r"a/\d+|[b-d]{2}",)), ["a/12", "bc"], ["a/", "b", "bcd", "xa/1"]),
    (ConstraintSpec(ConstraintKind.GRAMMAR, ('start: "(" start ")" | "x"',)), ["x", "((x))"], ["(x", "", "x)"]),
    (ConstraintSpec(ConstraintKind.CHOICES, CHOICES.texts), ["ab", 'é\x7f😀"\\\n'], ["a", "abcd"]),
    (OBJECT, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{} ", '{"a": }']),
]


@pytest.mark.parametrize(("spec", "good", "bad"), CASES)
def test_each_kind_takes_its_language(spec: ConstraintSpec, good: list[str], bad: list[str]):
    assert [takes(spec, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("seed", range(10))
def test_walks_end_in_the_language(seed: int):
    assert text_of(walk(matcher(CHOICES), seed)) in CHOICES.texts
    assert isinstance(json.loads(text_of(walk(matcher(OBJECT), seed))), dict)
