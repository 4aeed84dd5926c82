"""What a Generate stream carries: keepalives, delivery modes, text or ids, stop strings, timings."""

from __future__ import annotations

from typing import Any

import pytest

from stepahead.v1 import generation_pb2, operations_pb2
from tests.e2e.stack import DELIVERY_FINAL_ONLY, Answer, eventually, fold, read_events, request, serve
from tests.e2e.tagged_oracle import continuation

pytestmark = pytest.mark.e2e

QUEUED, PREFILL, DECODE = (
    generation_pb2.Keepalive.PHASE_QUEUED,
    generation_pb2.Keepalive.PHASE_PREFILL,
    generation_pb2.Keepalive.PHASE_DECODE,
)
TABLE = "toy:score-table?eos="
"""Small steps help <end> <end> ..."""
ENDLESS = "toy:score-table?loop=help"
"""Small steps help help help ..."""


async def test_a_silent_stream_stays_alive_in_every_phase() -> None:
    """One row: the second request waits, then its 200 prompt tokens take 25 steps."""
    worker = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    async with serve("toy:sleep?ms=10", worker=worker, keepalive_s=0.04) as stack:
        first = stack.open(request([1], 30))
        leading = Answer()
        await read_events(first, "started", leading)
        second = await stack.answer(request(list(range(200)), 2))
        assert (await fold(first, leading)).ok
        assert second.ok
        assert {QUEUED, PREFILL} <= set(second.phases)
        assert second.phases == sorted(second.phases)


async def test_a_final_only_stream_is_one_delta_and_keepalives() -> None:
    """K1. Tokens that are not delivered yet are no reason to be silent."""
    async with serve("toy:sleep?ms=5", keepalive_s=0.04) as stack:
        streamed = await stack.generate([1, 2], 60)
        answer = await stack.generate([1, 2], 60, delivery=DELIVERY_FINAL_ONLY)
        assert answer.ok
        assert answer.token_ids == streamed.token_ids
        assert (answer.num_deltas, len(answer.token_ids)) == (1, 60)
        assert answer.phases.count(DECODE) >= 2
        assert streamed.num_deltas > 1


@pytest.mark.parametrize("final_only", [False, True])
@pytest.mark.parametrize("stops", [[], ["help"]])
@pytest.mark.parametrize(("want_text", "want_token_ids"), [(True, True), (True, False), (False, True)])
async def test_a_stream_carries_what_was_asked_for(
    want_text: bool, want_token_ids: bool, stops: list[str], final_only: bool
) -> None:
    fields: dict[str, Any] = {"delivery": DELIVERY_FINAL_ONLY} if final_only else {}
    async with serve(TABLE) as stack:
        message = request("Small", 2, stop_strings=stops, **fields)
        message.output.text, message.output.token_ids = want_text, want_token_ids
        call = stack.open(message)
        answer = Answer()
        first_indexes: list[int] = []
        while (response := await call.read()) and hasattr(response, "events"):
            for event in response.events:
                if event.HasField("delta"):
                    assert event.delta.text or event.delta.token_ids, "an empty delta"
                    first_indexes.append(event.delta.first_token_index)
                    answer.add_tokens(event.delta.token_ids)
                    answer.text += event.delta.text
                elif event.HasField("choice_finished"):
                    answer.choice = event.choice_finished
        assert answer.token_ids == ([2, 3] if want_token_ids else [])
        assert answer.text == ("steps help" if not stops else "steps ") * want_text
        assert answer.reason == ("STOP" if stops else "LENGTH")
        assert answer.choice is not None
        assert answer.choice.output_tokens == 2
        assert first_indexes == sorted(first_indexes)


async def test_a_model_without_a_tokenizer_speaks_in_ids() -> None:
    async with serve("toy:tagged") as stack:
        answer = await stack.generate([1, 2, 3], 5)
        assert (answer.token_ids, answer.text) == (continuation([1, 2, 3], 5), "")
        for fields, named in (
            ({"want_text": True}, "output.text"),
            ({"stop_strings": ["x"]}, "stopping.stop_strings"),
            ({"prompt": "text"}, "text"),
            ({"want_token_ids": False}, "output"),
        ):
            assert (await stack.generate(**fields)).fields == [named]


STOPS: list[tuple[str, dict[str, Any], str, str, int, str]] = [
    # name, fields of the request, text, reason, tokens, matched stop
    ("inside a token", {"stop_strings": ["tep"]}, "s", "STOP", 1, "tep"),
    ("across tokens", {"stop_strings": ["s he"]}, "step", "STOP", 2, "s he"),
    ("kept", {"stop_strings": ["s he"], "include_stop_in_output": True}, "steps he", "STOP", 2, "s he"),
    ("on the last allowed token", {"stop_strings": ["lp"], "max_tokens": 2}, "steps he", "STOP", 2, "lp"),
    ("a beginning only", {"stop_strings": ["s hex"], "max_tokens": 2}, "steps help", "LENGTH", 2, ""),
    ("the earliest of several", {"stop_strings": ["help", "eps"]}, "st", "STOP", 1, "eps"),
    ("not before min_tokens", {"stop_strings": ["p"], "min_tokens": 1}, "steps hel", "STOP", 2, "p"),
]  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("final_only", [False, True])
@pytest.mark.parametrize("case", STOPS, ids=[case[0] for case in STOPS])
async def test_stop_strings(
    case: tuple[str, dict[str, Any], str, str, int, str], final_only: bool, depth: int
) -> None:
    """BL-16, D5, K1, K2, K3, K6."""
    _, fields, text, reason, num_tokens, matched = case
    extra: dict[str, Any] = {"delivery": DELIVERY_FINAL_ONLY} if final_only else {}
    async with serve(ENDLESS, overlap_depth=depth) as stack:
        answer = await stack.generate("Small", **({"max_tokens": 20} | fields | extra))
        assert (answer.ok, answer.text, answer.reason) == (True, text, reason), answer
        assert answer.token_ids == [2, 3, 3][:num_tokens]
        assert answer.choice is not None
        assert answer.finished is not None
        assert answer.choice.stop_string == matched
        assert answer.choice.output_tokens == answer.finished.usage.output_tokens == num_tokens
        await stack.assert_quiescent()


@pytest.mark.parametrize(
    ("fields", "tokens", "reason", "matched"),
    [
        ({}, [2, 3, 4], "STOP", 4),
        ({"max_tokens": 3}, [2, 3, 4], "STOP", 4),
        ({"max_tokens": 2}, [2, 3], "LENGTH", 0),
        ({"ignore_eos": True, "max_tokens": 5}, [2, 3, 4, 4, 4], "LENGTH", 0),
        ({"stop_token_ids": [2]}, [2], "STOP", 2),
        ({"stop_token_ids": [3], "ignore_eos": True}, [2, 3], "STOP", 3),
        ({"stop_token_ids": [2], "max_tokens": 1}, [2], "STOP", 2),
    ],
)
async def test_stop_ids_and_end_of_sequence(
    fields: dict[str, Any], tokens: list[int], reason: str, matched: int
) -> None:
    """D5, D7, BL-18, BL-19, BL-34: the id is one of the tokens and no part of the text."""
    async with serve("toy:score-table") as stack:
        answer = await stack.generate("Small", **({"max_tokens": 20} | fields))
        assert (answer.ok, answer.token_ids, answer.reason) == (True, tokens, reason)
        assert answer.choice is not None
        assert answer.choice.token_id == matched
        words = ["<start>", "Small", "steps", "help", "<end>"]
        visible = tokens[:-1] if matched else tokens
        assert answer.text == " ".join(words[token] for token in visible if token != 4)


async def test_started_echoes_what_was_applied() -> None:
    async with serve("toy:score-table", default_max_tokens=7) as stack:
        answer = await stack.answer(generation_pb2.GenerateRequest(text="Small steps", request_id="echo"))
        started = answer.started
        assert started is not None
        assert (started.request_id, started.model, started.prompt_tokens) == ("echo", "toy:score-table", 3)
        assert started.applied_sampling.temperature == 0
        assert started.applied_sampling.HasField("seed")
        assert started.applied_stopping.max_tokens == 7
        assert answer.finished is not None
        timings = answer.finished.timings
        assert 0 <= timings.queue_ns <= timings.first_token_ns <= timings.total_ns


async def test_a_reported_seed_repeats_the_answer() -> None:
    """J4."""
    async with serve("toy:tagged") as stack:
        first = await stack.generate([1, 2], 20, temperature=1.0)
        assert first.started is not None
        seed = first.started.applied_sampling.seed
        assert first.token_ids == continuation([1, 2], 20, temperature=1.0, seed=seed)
        again = await stack.generate([1, 2], 20, temperature=1.0, seed=seed)
        assert again.token_ids == first.token_ids


async def test_live_requests_are_listed_in_pages() -> None:
    async with serve("toy:sleep?ms=5") as stack:
        calls = [stack.open(request([index], 200, request_id=f"r{index}")) for index in range(5)]
        await eventually(lambda: len(stack.server.engine.book.requests) == 5)
        seen: list[str] = []
        token = ""
        while True:
            page = await stack.operations.ListRequests(
                operations_pb2.ListRequestsRequest(page_size=2, page_token=token)
            )
            assert len(page.requests) <= 2
            seen += [each.request_id for each in page.requests]
            token = page.next_page_token
            if not token:
                break
        assert sorted(seen) == [f"r{index}" for index in range(5)]
        for call in calls:
            call.cancel()
        await stack.assert_quiescent()
