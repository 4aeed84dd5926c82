"""A fault in one request's text ends that request only (rule K8)."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from stepahead.scheduler.text.choice_text import ChoiceText, TextStep
from stepahead.scheduler.text.errors import DetokenizeError
from tests.e2e.stack import DELIVERY_FINAL_ONLY, request, serve

BROKEN = 3
"""The token that cannot be decoded while `brittle` is at work: "help" of the score table."""


@pytest.fixture
def brittle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text in which one token cannot be decoded."""
    push = ChoiceText.push

    def push_or_fail(self: ChoiceText, token_ids: Any) -> TextStep:
        if BROKEN in token_ids:
            raise DetokenizeError(f"token {BROKEN}")
        return push(self, token_ids)

    monkeypatch.setattr(ChoiceText, "push", push_or_fail)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("streamed", {}),
    ("at the end", {"delivery": DELIVERY_FINAL_ONLY}),
    ("with stop strings", {"stop_strings": ["zzz"]}),
    ("on the last token", {"max_tokens": 2}),
    ("on the last token with stop strings", {"max_tokens": 2, "stop_strings": ["zzz"]}),
]


@pytest.mark.usefixtures("brittle")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("fields", [case[1] for case in CASES], ids=[case[0] for case in CASES])
async def test_k8_one_bad_token_ends_one_request(fields: dict[str, Any], depth: int) -> None:
    async with serve("toy:score-table?loop=help", overlap_depth=depth) as stack:
        failing = request("Small", **({"max_tokens": 30} | fields))
        answer, neighbour = await stack.answers([failing, request([0], 30, want_text=False)])
        assert answer.code is grpc.StatusCode.INTERNAL
        assert answer.error_info.reason == "INTERNAL"
        assert answer.error_info.metadata["incident"]
        assert answer.reason == "ERROR"
        assert "token" not in answer.message
        assert neighbour.ok
        assert len(neighbour.token_ids) == 30
        await stack.assert_quiescent()
        totals = (await stack.status()).totals
        assert (totals.requests_accepted, totals.requests_finished, totals.requests_failed) == (2, 1, 1)
