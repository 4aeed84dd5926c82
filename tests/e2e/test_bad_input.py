"""Every bad input gets a status that names its field, and the server goes on serving."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from stepahead.v1 import generation_pb2
from tests.e2e.stack import Stack, fold, request, serve

pytestmark = pytest.mark.e2e

NAN, INFINITY = float("nan"), float("inf")
MODEL_LEN = 256

BAD: list[tuple[str, dict[str, Any], list[str]]] = [
    ("empty token ids", {"prompt": []}, ["token_ids.ids"]),
    ("empty text", {"prompt": ""}, ["text"]),
    ("max_tokens 0", {"max_tokens": 0}, ["stopping.max_tokens"]),
    ("temperature -1", {"temperature": -1.0}, ["sampling.temperature"]),
    ("temperature NaN", {"temperature": NAN}, ["sampling.temperature"]),
    ("temperature infinite", {"temperature": INFINITY}, ["sampling.temperature"]),
    ("top_p 0", {"top_p": 0.0}, ["sampling.top_p"]),
    ("top_p 1.5", {"top_p": 1.5}, ["sampling.top_p"]),
    ("top_p NaN", {"top_p": NAN}, ["sampling.top_p"]),
    ("token id out of range", {"prompt": [1, 2, 5]}, ["token_ids.ids[2]"]),
    ("huge token id", {"prompt": [2**32 - 1]}, ["token_ids.ids[0]"]),
    ("prompt at the limit", {"prompt": [1] * MODEL_LEN, "max_tokens": 1}, ["input"]),
    ("prompt over the limit", {"prompt": [1] * 10 * MODEL_LEN, "max_tokens": None}, ["input"]),
    ("prompt and output over the limit", {"prompt": [1] * 250, "max_tokens": 7}, ["stopping.max_tokens"]),
    ("5 MiB prompt", {"prompt": "Small " * 873_814}, ["text"]),
    ("several at once", {"top_p": 2.0, "temperature": -1.0, "max_tokens": 0}, [
        "sampling.temperature", "sampling.top_p", "stopping.max_tokens",
    ]),
]  # fmt: skip


async def assert_serves(stack: Stack) -> None:
    answer = await stack.generate("Small", 8)
    assert (answer.ok, answer.text) == (True, "steps help"), answer


@pytest.mark.parametrize(("fields", "named"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
async def test_bad_input_names_its_field(fields: dict[str, Any], named: list[str]) -> None:
    """V1, V2, V4, V5, J11, BL-19, BL-21, BL-22."""
    async with serve("toy:score-table") as stack:
        answer = await stack.generate(**fields)
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, answer
        assert answer.fields == named
        for field in named:
            assert field in answer.message
        await assert_serves(stack)
        await stack.assert_quiescent()


async def test_a_prompt_over_the_limit_is_told_both_numbers() -> None:
    """V2."""
    async with serve("toy:score-table") as stack:
        answer = await stack.generate([1] * 300, 1)
        assert dict(answer.error_info.metadata) == {"limit": "255", "actual": "300"}
        assert "300" in answer.message
        assert "255" in answer.message
        longest = await stack.generate([1] * 255, 1)
        assert (longest.ok, longest.reason) == (True, "LENGTH")


async def test_an_unknown_model_is_not_found() -> None:
    """V4."""
    async with serve("toy:score-table") as stack:
        answer = await stack.generate("Small", model="gpt-5")
        assert answer.code is grpc.StatusCode.NOT_FOUND
        assert answer.detail(error_details_pb2.ResourceInfo).resource_name == "gpt-5"
        await assert_serves(stack)


@pytest.mark.parametrize(
    "message",
    [
        generation_pb2.GenerateRequest(text="Small", model="m" * 2**20),
        generation_pb2.GenerateRequest(
            chat=generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(content="hi")] * 4_000)
        ),
        generation_pb2.GenerateRequest(text="Small", request_id="i" * 2**20),
    ],
    ids=["model", "chat", "request_id"],
)
async def test_a_huge_fault_has_a_small_status(message: generation_pb2.GenerateRequest) -> None:
    """A status travels in headers: one that does not fit them is lost, and with it what was wrong."""
    async with serve("toy:score-table") as stack:
        answer = await fold(stack.open(message))
        assert answer.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), answer
        assert answer.details
        await assert_serves(stack)


async def test_a_bad_request_leaves_its_neighbour_alone() -> None:
    """O7, F8."""
    async with serve("toy:score-table?loop=help") as stack:
        neighbour = stack.open(request("Small steps", 200))
        for case in BAD:
            assert (await stack.generate(**case[1])).code is grpc.StatusCode.INVALID_ARGUMENT
        answer = await fold(neighbour)
        assert (answer.ok, answer.token_ids) == (True, [3] * 200)
