"""The order of events that a client accepts (B11, D8)."""

import pytest

from stepahead.client import GenerationRequest, Phase, ProtocolError, TokenLogprob
from stepahead.client.folding import CompletionFold
from stepahead.v1 import generation_pb2
from tests.client.fake_server import choice_finished, columns, delta, finished, keepalive, prompt_logprobs, started


def fold_of(*events, **options):
    fold = CompletionFold(GenerationRequest(prompt="hi", **options))
    fold.feed(events)
    return fold


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([delta(0, [1])], "before the request was started"),
        ([started(), started()], "started twice"),
        ([started(), delta(1, [1])], "continued at token 1, expected 0"),
        ([started(), delta(0, [1]), delta(0, [1])], "continued at token 0, expected 1"),
        ([started(), delta(0, [1], choice=1)], "choice 1 was not asked for"),
        ([started(), choice_finished(0), delta(0, [1])], "went on after its end"),
        ([started(), choice_finished(0), choice_finished(0)], "went on after its end"),
        ([started(), delta(0, [1]), choice_finished(2)], "ended after 2 tokens, but 1 came"),
        ([started(), finished(0)], "ended after 0 of 1 choices"),
        (
            [started(), choice_finished(0), finished(0), keepalive(generation_pb2.Keepalive.PHASE_DECODE)],
            "after the end",
        ),
        ([started(), choice_finished(0, 9)], "unknown finish reason 9"),
        ([started(), prompt_logprobs(2, (-1.0, 1, []))], "continued at position 2, expected 1"),
        ([started(), *[prompt_logprobs(1, (-1.0, 1, []))] * 2], "continued at position 1, expected 2"),
        ([started(), delta(0, [1, 2], logprobs=columns((-1.0, 1, [])))], "different lengths"),
    ],
)
def test_broken_order_is_a_protocol_error(events, text):
    with pytest.raises(ProtocolError, match=text):
        fold_of(*events)


def test_completion_before_the_end_is_refused():
    with pytest.raises(ProtocolError, match="without the end"):
        fold_of(started(), delta(0, [1])).completion()


def test_progress_is_visible_on_the_way():
    fold = fold_of(keepalive(generation_pb2.Keepalive.PHASE_QUEUED))
    assert (fold.phase, fold.started, fold.text()) == (Phase.QUEUED, None, "")
    fold.feed([started("x")])
    assert fold.phase is Phase.PREFILL
    fold.feed([delta(0, [5, 6], "ab")])
    assert (fold.phase, fold.text(), fold.token_ids()) == (Phase.DECODE, "ab", (5, 6))
    assert not fold.finished


def test_stop_id_is_reported_as_matched():
    fold = fold_of(
        started(),
        delta(0, [4]),
        choice_finished(1, generation_pb2.FINISH_REASON_STOP, token_id=4),
        finished(1),
    )
    assert fold.completion().matched == 4


def test_n8_an_answer_that_is_not_exact_says_from_where_on():
    said = {"window_replays": 3, "approximate_replays": 2, "first_approximate_token_index": 0}
    for fields, first in ((said, 0), ({"window_replays": 3}, None)):
        fold = fold_of(started(), delta(0, [4]), choice_finished(1, **fields), finished(1))
        (choice,) = fold.completion().choices
        found = (choice.window_replays, choice.approximate_replays, choice.first_approximate_token_index)
        assert found == (3, fields.get("approximate_replays", 0), first)


def test_without_token_ids_the_indexes_are_the_servers_own():
    fold = fold_of(
        started(), delta(0, [], "a"), delta(4, [], "b"), choice_finished(6), finished(6), token_ids=False
    )
    assert fold.completion().text == "ab"
    assert fold.completion().choices[0].output_tokens == 6


def test_choices_take_turns_and_keep_their_log_probabilities():
    fold = CompletionFold(GenerationRequest(prompt="hi", num_choices=2))
    likely = [columns((-0.5, 1, [(token, -0.5), (9, -4.0)])) for token in range(3)]
    deltas = fold.feed(
        [
            started(),
            prompt_logprobs(1, (-1.0, 1, []), (-2.0, 2, [])),
            prompt_logprobs(3, (-3.0, 3, [])),
            delta(0, [0], "a", logprobs=likely[0]),
            delta(0, [1], "x", choice=1, logprobs=likely[1]),
            delta(1, [2], "b", logprobs=likely[2]),
            choice_finished(1, choice=1),
            choice_finished(2),
            finished(3),
        ]
    )
    completion = fold.completion()
    assert [each.text for each in completion.choices] == ["ab", "x"]
    assert [[entry.token_id for entry in each.logprobs] for each in completion.choices] == [[0, 2], [1]]
    assert completion.logprobs[1] == TokenLogprob(2, -0.5, 1, ((2, -0.5), (9, -4.0)))
    assert [each.logprobs[0].top[0] for each in deltas] == [(0, -0.5), (1, -0.5), (2, -0.5)]
    # The prompt was text: nobody but the server knows its tokens.
    assert [each and (each.token_id, each.rank) for each in completion.prompt_logprobs] == [
        None,
        (None, 1),
        (None, 2),
        (None, 3),
    ]


def test_log_probabilities_without_token_ids():
    fold = fold_of(
        started(),
        delta(0, [], "ab", logprobs=columns((-0.5, 1, []), (-1.5, 2, []))),
        choice_finished(2),
        finished(2),
        token_ids=False,
    )
    assert [(each.token_id, each.logprob) for each in fold.completion().logprobs] == [(None, -0.5), (None, -1.5)]


def test_later_events_do_not_change_what_was_handed_out():
    fold = CompletionFold(GenerationRequest(prompt="hi"))
    first = fold.feed([started(), delta(0, [1], "a")])[0]
    fold.feed([delta(1, [2], "b")])
    assert (first.token_ids, first.text) == ((1,), "a")
