"""Stop strings: rules K2 and K3, against naive models."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepahead.scheduler.text.stop_strings import StopScan, StopStringMatcher, StopStrings

# Two letters make overlaps, ties and self-overlapping stop strings the normal case.
TEXTS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
PARTS = st.lists(TEXTS, max_size=8)


def naive_match(parts: list[str], stops: list[str]) -> tuple[int, int, str] | None:
    """(number of parts used, begin, stop string): search the whole text again after every part."""
    text = ""
    for num_parts, part in enumerate(parts, 1):
        text += part
        found = [(text.find(stop), index) for index, stop in enumerate(stops) if stop in text]
        if found:
            begin, index = min(found)
            return num_parts, begin, stops[index]
    return None


def naive_hold(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that some stop string begins with."""
    return max(
        (size for stop in stops for size in range(len(stop)) if size and text.endswith(stop[:size])), default=0
    )


def run(parts: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """Texts released part by part, and what matched; unused parts are left alone."""
    matcher = StopStringMatcher(stops, include_stop=include)
    texts: list[str] = []
    for part in parts:
        scan = matcher.push(part)
        texts.append(scan.text)
        if scan.matched is not None:
            return texts, scan.matched
    return [*texts, matcher.finish()], None


@given(parts=PARTS, stops=STOPS)
@example(parts=["abab"], stops=["ba", "ab"])
@example(parts=["ab", "b"], stops=["abb", "ab"])
@example(parts=["abb"], stops=["abb", "ab"])
@example(parts=["aab"], stops=["b", "aab"])
def test_k3_earliest_position_wins_and_ties_go_by_list_order(parts: list[str], stops: list[str]):
    texts, matched = run(parts, stops)
    expected = naive_match(parts, stops)
    if expected is None:
        assert matched is None
        assert "".join(texts) == "".join(parts)
    else:
        num_parts, begin, stop = expected
        assert matched == stop
        assert len(texts) == num_parts
        assert "".join(texts) == "".join(parts)[:begin]


@given(parts=PARTS, stops=STOPS)
def test_include_stop_keeps_the_match_and_nothing_after_it(parts: list[str], stops: list[str]):
    texts, matched = run(parts, stops, include=True)
    expected = naive_match(parts, stops)
    whole = "".join(parts)
    assert "".join(texts) == (whole if expected is None else whole[: expected[1] + len(expected[2])])
    assert matched == (None if expected is None else expected[2])


@given(parts=PARTS, stops=STOPS)
def test_k2_exactly_what_can_still_become_a_stop_string_is_held_back(parts: list[str], stops: list[str]):
    matcher = StopStringMatcher(stops, include_stop=False)
    text = shown = ""
    for part in parts:
        scan = matcher.push(part)
        if scan.matched is not None:
            assert matcher.finish() == ""
            return
        text, shown = text + part, shown + scan.text
        assert len(text) - len(shown) == naive_hold(text, stops)
        assert text.startswith(shown)
    assert shown + matcher.finish() == text


@given(parts=PARTS, stops=STOPS)
def test_include_stop_holds_nothing_back(parts: list[str], stops: list[str]):
    matcher = StopStringMatcher(stops, include_stop=True)
    for part in parts:
        scan = matcher.push(part)
        if scan.matched is not None:
            return
        assert scan.text == part
    assert matcher.finish() == ""


@given(text=TEXTS, stop=st.text("ab", min_size=1, max_size=5), cuts=st.lists(st.integers(0, 12)).map(sorted))
def test_k1_one_stop_string_gives_the_same_text_for_every_chunking(text: str, stop: str, cuts: list[int]):
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    texts, matched = run(parts, [stop])
    whole, expected = run([text], [stop])
    assert ("".join(texts), matched) == ("".join(whole), expected)


@given(before=TEXTS, parts=PARTS, stops=STOPS)
def test_passed_over_text_may_begin_a_match_but_not_end_one(before: str, parts: list[str], stops: list[str]):
    matcher = StopStringMatcher(stops, include_stop=False)
    text, shown = before, matcher.pass_over(before)
    assert len(text) - len(shown) == naive_hold(text, stops)
    for part in parts:
        scan = matcher.push(part)
        old, text, shown = len(text), text + part, shown + scan.text
        ends = [
            (text.find(stop, max(0, old + 1 - len(stop))), index)
            for index, stop in enumerate(stops)
            if text.find(stop, max(0, old + 1 - len(stop))) >= 0
        ]
        if ends:
            begin, index = min(ends)
            assert scan.matched == stops[index]
            assert shown == text[:begin]
            return
        assert scan.matched is None
    assert shown + matcher.finish() == text


def test_the_same_string_twice_matches_as_the_first():
    assert run(["xab"], ["ab", "ab"]) == (["x"], "ab")


@pytest.mark.parametrize(
    ("parts", "stops", "texts"),
    [
        (["wait", "\n", "\nHuman: no"], ["\n\nHuman:"], ["wait", "", ""]),
        (["wait", "\n", "\nHumans"], ["\n\nHuman:"], ["wait", "", "\n\nHumans", ""]),
        (["tail \n"], ["\n\n"], ["tail ", "\n"]),
        (["a😀", "b"], ["😀b"], ["a", ""]),
    ],
)
def test_k2_held_text_is_released_or_flushed(parts: list[str], stops: list[str], texts: list[str]):
    assert run(parts, stops)[0] == texts


def test_compiled_stop_strings_are_shared_between_choices():
    stops = StopStrings(["ab"])
    first, second = (StopStringMatcher(stops, include_stop=False) for _ in range(2))
    assert first.push("xa") == StopScan("x", None)
    assert second.push("b") == StopScan("b", None)
    assert first.push("b") == StopScan("", "ab")
    assert first.has_matched
    assert not second.has_matched


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStringMatcher(["a", ""], include_stop=False)


@pytest.mark.parametrize("method", ["push", "pass_over"])
def test_nothing_may_follow_a_match(method: str):
    matcher = StopStringMatcher(["a"], include_stop=False)
    matcher.push("a")
    with pytest.raises(AssertionError, match="after a match"):
        getattr(matcher, method)("b")
