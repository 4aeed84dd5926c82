"""The output log: one writer, any number of cursors, text that only grows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.scheduler.core import Finished, FinishReason, RequestKey
from stepahead.scheduler.live_request import LiveRequest
from stepahead.scheduler.output_log import LogCursor, OutputLog
from stepahead.scheduler.subscription import Subscription
from stepahead.scheduler.text.choice_text import ChoiceText
from stepahead.v1 import generation_pb2
from tests.scheduler.requests import PIECES, codec, live_request

AB, CDEF, G, SPACE = 1, 2, 3, 4


def log_with(**fields: Any) -> OutputLog:
    return OutputLog(lambda: ChoiceText(codec(), **fields))


def test_a_cursor_reads_what_is_new() -> None:
    log, cursor = log_with(), LogCursor()
    assert log.read(cursor) is None
    log.token_ids.extend([AB, G])
    assert log.decode() is None
    first = log.read(cursor)
    assert first is not None
    assert (first.first_token_index, first.token_ids, first.text) == (0, [AB, G], "ABG")
    assert log.read(cursor) is None
    log.token_ids.append(CDEF)
    log.decode()
    second = log.read(cursor)
    assert second is not None
    assert (second.first_token_index, second.token_ids, second.text) == (2, [CDEF], "CDEF")


@given(st.lists(st.sampled_from([AB, CDEF, G, SPACE]), max_size=20), st.data())
def test_k1_k4_every_cursor_reads_the_same(token_ids: list[int], data: st.DataObject) -> None:
    """Cursors that look at any time see the same tokens and the same text."""
    stops = data.draw(st.sampled_from([(), ("GG",), ("DE",), ("F G",)]))
    log = log_with(stop_strings=stops)
    cursors = [LogCursor() for _ in range(3)]
    seen: list[tuple[list[int], str]] = [([], "") for _ in cursors]

    def look(index: int) -> None:
        fresh = log.read(cursors[index])
        if fresh is not None:
            tokens, text = seen[index]
            assert fresh.first_token_index == len(tokens)
            seen[index] = (tokens + fresh.token_ids, text + fresh.text)

    num_tokens = 0
    for token_id in token_ids:
        log.token_ids.append(token_id)
        num_tokens += 1
        if (stops or data.draw(st.booleans())) and log.decode() is not None:
            num_tokens = log.num_decoded
            break
        for index in data.draw(st.sets(st.sampled_from([0, 1]))):
            look(index)
    log.end(num_tokens, ends_with_stop_id=False)
    for index in range(3):
        look(index)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == token_ids[:num_tokens]
    text = "".join(PIECES[token] for token in token_ids[:num_tokens])
    assert seen[0][1] == (text[: text.index(stops[0])] if log.matched_stop else text)


def test_k6_a_match_cuts_what_came_after_it() -> None:
    log, cursor = log_with(stop_strings=["FG"]), LogCursor()
    log.token_ids.extend([CDEF, G, AB])
    assert log.decode() == "FG"
    assert log.num_decoded == 2
    log.end(2, ends_with_stop_id=False)
    assert log.decode() == "FG", "nothing changes after the end"
    fresh = log.read(cursor)
    assert fresh is not None
    assert (fresh.token_ids, fresh.text) == ([CDEF, G], "CDE")


def test_k2_held_back_text_becomes_final_at_the_end() -> None:
    log, cursor = log_with(stop_strings=["GX"]), LogCursor()
    log.token_ids.append(G)
    assert log.decode() is None
    held = log.read(cursor)
    assert held is not None
    assert (held.token_ids, held.text) == ([G], "")
    log.end(1, ends_with_stop_id=False)
    rest = log.read(cursor)
    assert rest is not None
    assert (rest.first_token_index, rest.token_ids, rest.text) == (1, [], "G")


def test_a_stop_id_is_a_token_and_no_text() -> None:
    log, cursor = log_with(), LogCursor()
    log.token_ids.extend([AB, G])
    log.end(2, ends_with_stop_id=True)
    fresh = log.read(cursor)
    assert fresh is not None
    assert (fresh.token_ids, fresh.text) == ([AB, G], "AB")


def test_a_log_without_text_keeps_ids_only() -> None:
    log, cursor = OutputLog(None), LogCursor()
    log.token_ids.extend([AB, G])
    assert log.decode() is None
    log.end(1, ends_with_stop_id=False)
    fresh = log.read(cursor)
    assert fresh is not None
    assert (fresh.token_ids, fresh.text) == ([AB], "")


# ---------------------------------------------------------------------------------------------- events


class Writer:
    """A stream that is woken by nobody."""

    queued = False
    woken = False

    def wake(self) -> None:
        raise AssertionError("not here")


def take(subscription: Subscription) -> tuple[list[generation_pb2.GenerationEvent], bool]:
    """What a message would carry, and whether nothing follows."""
    response = generation_pb2.GenerateResponse()
    done = subscription.take(response.events)
    return list(response.events), done


def finish(live: LiveRequest, reason: FinishReason, count: int, **fields: Any) -> None:
    (choice,) = live.choices
    choice.finished = Finished(RequestKey(1), reason, count, **fields)
    live.times.finished_ns = 10
    choice.log.end(count, ends_with_stop_id="matched_token_id" in fields)
    live.is_over = True


async def test_a_late_subscriber_gets_everything_from_the_start() -> None:
    live = await live_request(generation_pb2.GenerateRequest(token_ids={"ids": [1]}))
    early = Subscription(live, Writer())
    assert take(early) == ([], False), "nothing before admission"
    live.times.admitted_ns = 5
    live.choices[0].log.token_ids.append(AB)
    events, done = take(early)
    assert ([event.WhichOneof("kind") for event in events], done) == (["started", "delta"], False)
    assert events[0].started.queue_ns == 4
    live.choices[0].log.token_ids.append(G)
    finish(live, FinishReason.LENGTH, 2)
    events, done = take(early)
    assert ([event.WhichOneof("kind") for event in events], done) == (
        ["delta", "choice_finished", "finished"],
        True,
    )
    late, done = take(Subscription(live, Writer()))
    assert done
    assert [event.WhichOneof("kind") for event in late] == ["started", "delta", "choice_finished", "finished"]
    assert (list(late[1].delta.token_ids), late[1].delta.text) == ([AB, G], "ABG")


@pytest.mark.parametrize("stops", [[], ["zzz"]])
async def test_text_that_was_not_asked_for_is_not_delivered(stops: list[str]) -> None:
    request = generation_pb2.GenerateRequest(
        token_ids={"ids": [1]}, output={"text": False}, stopping={"stop_strings": stops}
    )
    live = await live_request(request)
    live.times.admitted_ns = 5
    live.choices[0].log.token_ids.append(AB)
    live.choices[0].log.decode()
    finish(live, FinishReason.LENGTH, 1)
    events, _ = take(Subscription(live, Writer()))
    (delta,) = [event.delta for event in events if event.HasField("delta")]
    assert (list(delta.token_ids), delta.text) == ([AB], "")


async def test_a_closed_subscription_is_gone() -> None:
    live = await live_request(generation_pb2.GenerateRequest(token_ids={"ids": [1]}))
    first, second = Subscription(live, Writer()), Subscription(live, Writer())
    first.close()
    first.close()
    assert live.subscriptions == [second]
