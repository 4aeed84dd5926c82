"""Every field of a request, and the exact path that a fault is named by."""

from __future__ import annotations

from typing import Any

import pytest

from stepahead.scheduler.errors import InvalidRequest, NotFound
from stepahead.scheduler.prompt_input import MAX_CHAT_MESSAGES, prompt_token_ids
from stepahead.scheduler.served_model import MAX_PROMPT_BYTES, SamplingDefaults
from stepahead.scheduler.validation import check_model
from stepahead.v1 import generation_pb2
from tests.scheduler.requests import EOS, VOCAB_SIZE, accept, codec, served_model

NAN, INFINITY = float("nan"), float("inf")
Message = generation_pb2.GenerateRequest


def message(**fields: Any) -> generation_pb2.GenerateRequest:
    """A good request of three ids, with other fields."""
    whole: dict[str, Any] = {"token_ids": generation_pb2.TokenIdsInput(ids=[1, 2, 3])} | fields
    if {"text", "chat"} & set(fields):
        del whole["token_ids"]
    return Message(**whole)


async def named(request: generation_pb2.GenerateRequest, **model: Any) -> list[str]:
    """The fields a refusal names."""
    with pytest.raises(InvalidRequest) as caught:
        await accept(request, served_model(**({"codec": codec()} | model)))
    for violation in caught.value.violations:
        assert violation.description
        assert violation.field in caught.value.text
    return [violation.field for violation in caught.value.violations]


FLOATS: list[tuple[str, list[float], list[float]]] = [
    # field, refused, accepted
    ("temperature", [-1.0, -1e-9, 100.5, NAN, INFINITY, -INFINITY, 3e38], [0.0, 1e-12, 1.0, 100.0]),
    ("top_p", [0.0, -0.5, 1.5, NAN, INFINITY], [1e-9, 0.5, 1.0]),
    ("min_p", [-0.1, 1.1, NAN, INFINITY], [0.0, 1.0]),
    ("repetition_penalty", [0.0, -1.0, 101.0, NAN, INFINITY], [0.5, 1.0, 100.0]),
    ("frequency_penalty", [-2.1, 2.1, NAN, -INFINITY], [0.0, 2.0]),
    ("presence_penalty", [-2.1, 2.1, NAN, INFINITY], [0.0, 2.0]),
]


@pytest.mark.parametrize(
    ("field", "value", "good"),
    [(name, value, value in good) for name, bad, good in FLOATS for value in bad + good],
)
async def test_v5_ranges_of_sampling(field: str, value: float, good: bool) -> None:
    request = message(sampling={field: value})
    if good:
        assert getattr((await accept(request)).applied_sampling, field) >= 0
    else:
        assert await named(request) == [f"sampling.{field}"]


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"sampling": {"top_k": -2}}, ["sampling.top_k"]),
    ({"sampling": {"top_k": -(2**31)}}, ["sampling.top_k"]),
    ({"stopping": {"max_tokens": 0}}, ["stopping.max_tokens"]),
    ({"stopping": {"max_tokens": 14}}, ["stopping.max_tokens"]),
    ({"stopping": {"max_tokens": 2**32 - 1}}, ["stopping.max_tokens"]),
    ({"stopping": {"max_tokens": 3, "min_tokens": 4}}, ["stopping.min_tokens"]),
    ({"stopping": {"min_tokens": 2**32 - 1}}, ["stopping.min_tokens"]),
    ({"stopping": {"stop_strings": [""]}}, ["stopping.stop_strings[0]"]),
    ({"stopping": {"stop_strings": ["a", "é" * 129]}}, ["stopping.stop_strings[1]"]),
    ({"stopping": {"stop_strings": ["a"] * 17}}, ["stopping.stop_strings"]),
    ({"stopping": {"stop_token_ids": [1, VOCAB_SIZE]}}, ["stopping.stop_token_ids[1]"]),
    ({"stopping": {"stop_token_ids": [1] * 65}}, ["stopping.stop_token_ids"]),
    ({"token_ids": {"ids": []}}, ["token_ids.ids"]),
    ({"token_ids": {"ids": [0, VOCAB_SIZE, 99]}}, ["token_ids.ids[1]"]),
    ({"token_ids": {"ids": [2**32 - 1]}}, ["token_ids.ids[0]"]),
    ({"token_ids": {"ids": [1] * 16}}, ["input"]),
    ({"token_ids": {"ids": [1] * 160}}, ["input"]),
    ({"text": ""}, ["text"]),
    ({"text": "x" * (MAX_PROMPT_BYTES + 1)}, ["text"]),
    ({"text": "é" * (MAX_PROMPT_BYTES // 2 + 1)}, ["text"]),
    ({"chat": {"messages": []}}, ["chat.messages"]),
    ({"chat": {"messages": [{"role": "user"}] * (MAX_CHAT_MESSAGES + 1)}}, ["chat.messages"]),
    ({"chat": {"messages": [{"role": "user"}, {"content": "x"}]}}, ["chat.messages[1].role"]),
    ({"chat": {"messages": [{"role": "r" * 65}]}}, ["chat.messages[0].role"]),
    ({"chat": {"messages": [{"role": "user", "content": "x" * MAX_PROMPT_BYTES}]}}, ["chat"]),
    ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, ["chat"]),  # the model has no template
    ({"num_choices": 0}, ["num_choices"]),
    ({"num_choices": 65}, ["num_choices"]),
    ({"request_id": "a" * 129}, ["request_id"]),
    ({"request_id": "white space"}, ["request_id"]),
    ({"request_id": "ümlaut"}, ["request_id"]),
    ({"request_id": "\x00"}, ["request_id"]),
    ({"output": {"text": False, "token_ids": False}}, ["output"]),
    ({"output": {"delivery": 3}}, ["output.delivery"]),
    ({"scheduling": {"timeout_ms": 0}}, ["scheduling.timeout_ms"]),
    ({"scheduling": {"queue_timeout_ms": 0}}, ["scheduling.queue_timeout_ms"]),
    ({"logprobs": {"output_top_k": 21}}, ["logprobs.output_top_k"]),
    ({"logprobs": {"prompt_top_k": 2**32 - 1}}, ["logprobs.prompt_top_k"]),
    ({"logprobs": {"kind": 3}}, ["logprobs.kind"]),
    ({"sampling": {"logit_bias": [{"token_id": VOCAB_SIZE}]}}, ["sampling.logit_bias[0].token_id"]),
    ({"sampling": {"logit_bias": [{"token_id": 1}] * 2}}, ["sampling.logit_bias[1].token_id"]),
    ({"sampling": {"logit_bias": [{"bias": 100.5}]}}, ["sampling.logit_bias[0].bias"]),
    ({"sampling": {"logit_bias": [{"bias": NAN}]}}, ["sampling.logit_bias[0].bias"]),
    ({"sampling": {"bad_words": [{"ids": []}]}}, ["sampling.bad_words[0].ids"]),
    ({"sampling": {"bad_words": [{"ids": [1]}, {"ids": [1] * 65}]}}, ["sampling.bad_words[1].ids"]),
    ({"sampling": {"bad_words": [{"ids": [1, VOCAB_SIZE]}]}}, ["sampling.bad_words[0].ids[1]"]),
    ({"sampling": {"bad_words": [{"ids": [1]}] * 257}}, ["sampling.bad_words"]),
    ({"sampling": {"allowed_token_ids": [1, VOCAB_SIZE]}}, ["sampling.allowed_token_ids[1]"]),
    ({"sampling": {"allowed_token_ids": [1] * (VOCAB_SIZE + 1)}}, ["sampling.allowed_token_ids"]),
    ({"scheduling": {"reattach_window_ms": 600_001}}, ["scheduling.reattach_window_ms"]),
    ({"scheduling": {"priority": -1}}, ["scheduling.priority"]),
    ({"scheduling": {"priority": 5000}}, ["scheduling.priority"]),
    ({"scheduling": {"cache_salt": "x" * 257}}, ["scheduling.cache_salt"]),
    # All faults of a stage together, in the order of the stage.
    (
        {"request_id": " ", "sampling": {"top_p": 0.0, "top_k": -5}, "stopping": {"max_tokens": 0}},
        ["request_id", "sampling.top_p", "sampling.top_k", "stopping.max_tokens"],
    ),
]


@pytest.mark.parametrize(("fields", "expected"), BAD, ids=[str(case[1][-1]) for case in BAD])
async def test_bad_fields_are_named(fields: dict[str, Any], expected: list[str]) -> None:
    """V1, V2, V4, V5, J11."""
    assert await named(message(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "AB"}, "text"),
        ({"chat": {"messages": [{"role": "user", "content": "x"}]}}, "chat"),
        ({"output": {"text": True}}, "output.text"),
        ({"output": {"token_ids": False}}, "output"),
        ({"stopping": {"stop_strings": ["x"]}}, "stopping.stop_strings"),
    ],
)
async def test_a_model_without_a_tokenizer_takes_no_text(fields: dict[str, Any], field: str) -> None:
    assert await named(message(**fields), codec=None) == [field]


@pytest.mark.parametrize(("asked", "fault"), [(0, None), (6, "must be at least 7, the largest"), (7, None)])
async def test_n8_an_approximate_replay_feeds_a_window_at_least(asked: int, fault: str | None) -> None:
    """0 is exact, as if nothing was said; a model without such layers takes any number."""
    request = message(scheduling={"approximate_replay_tokens": asked})
    assert (await accept(request)).approximate_replay_tokens == asked
    model = served_model(codec(), largest_window=8)
    if fault is None:
        assert (await accept(request, model)).approximate_replay_tokens == asked
        return
    with pytest.raises(InvalidRequest, match=f"approximate_replay_tokens: {fault} window of tiny less 1"):
        await accept(request, model)


async def test_n8_an_approximate_replay_and_exact_values_of_the_prompt_contradict_each_other() -> None:
    asked = {"scheduling": {"approximate_replay_tokens": 9}}
    assert await named(message(**asked, logprobs={"prompt_top_k": 0})) == ["scheduling.approximate_replay_tokens"]
    assert (await accept(message(**asked, logprobs={"output_top_k": 0}))).approximate_replay_tokens == 9


async def test_v2_both_numbers_are_told() -> None:
    for request, numbers in (
        (message(token_ids={"ids": [1] * 20}), {"limit": "15", "actual": "20"}),
        (message(stopping={"max_tokens": 14}), {"limit": "13", "actual": "14"}),
        (message(text="x" * (MAX_PROMPT_BYTES + 5)), {"limit": "4194304", "actual": "4194309"}),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await accept(request)
        assert caught.value.metadata == numbers
        for number in numbers.values():
            assert number in caught.value.text


async def test_an_input_is_required() -> None:
    assert await named(Message()) == ["input"]
    with pytest.raises(InvalidRequest, match="input: one of text or chat is required"):
        await prompt_token_ids(generation_pb2.TokenizeRequest(), served_model(codec()))


async def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="'tiny'") as caught:
        await accept(message(model="huge"))
    assert (caught.value.kind, caught.value.name) == ("model", "huge")
    check_model("", served_model())
    check_model("tiny", served_model())


async def test_defaults_are_filled_in() -> None:
    accepted = await accept(message())
    assert (accepted.max_tokens, accepted.min_tokens, accepted.stop_token_ids) == (8, 0, {EOS})
    assert (accepted.want_text, accepted.want_token_ids, accepted.skip_special_tokens) == (True, True, True)
    assert (accepted.final_only, accepted.timeout_ms, accepted.queue_timeout_ms) == (False, None, None)
    assert accepted.request_id.startswith("req-")
    assert accepted.sampling.temperature == 1.0
    assert accepted.applied_sampling.seed == accepted.sampling.seed
    assert (await accept(message(token_ids={"ids": [1] * 12}))).max_tokens == 4, "as much as the context allows"
    assert (await accept(message(token_ids={"ids": [1] * 15}))).max_tokens == 1


async def test_the_model_decides_what_is_left_open() -> None:
    model = served_model(codec(), defaults=SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1))
    open_fields = (await accept(message(), model)).sampling
    assert (open_fields.temperature, open_fields.top_p, open_fields.top_k, open_fields.min_p) == (0.6, 0.9, 40, 0.1)
    zeros = (await accept(message(sampling={"temperature": 0, "top_k": 0, "min_p": 0}), model)).sampling
    assert (zeros.temperature, zeros.top_p, zeros.top_k, zeros.min_p) == (0, 0.9, 0, 0)


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 9.9e-6])
async def test_j9_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert (await accept(message(sampling={"temperature": temperature}))).sampling.temperature == 0


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (VOCAB_SIZE, VOCAB_SIZE), (10**9, 10**9)])
async def test_bl30_top_k(top_k: int, expected: int) -> None:
    assert (await accept(message(sampling={"top_k": top_k}))).sampling.top_k == expected


async def test_j6_bl18_end_of_sequence_and_stop_ids_are_two_sets() -> None:
    stopping = {"stop_token_ids": [2], "ignore_eos": True, "min_tokens": 3}
    accepted = await accept(message(stopping=stopping))
    assert accepted.stop_token_ids == {2}
    assert accepted.sampling.suppressed_token_ids == (2, EOS), "suppressed although it would not end the choice"
    without = await accept(message(stopping={"stop_token_ids": [2]}))
    assert without.stop_token_ids == {2, EOS}
    assert without.sampling.suppressed_token_ids == ()


async def test_seeds_are_kept_or_made() -> None:
    for seed in (0, 2**64 - 1):
        assert (await accept(message(sampling={"seed": seed}))).sampling.seed == seed
    made = {(await accept(message())).sampling.seed for _ in range(3)}
    assert len(made) == 3


async def test_long_prompts_are_tokenized_beside_the_loop() -> None:
    model = served_model(codec(), max_model_len=10_000)
    request = message(text="<unk>" * 2000)
    assert len((await accept(request, model)).prompt_token_ids) == len(codec().encode("<unk>" * 2000))
