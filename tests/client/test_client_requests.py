"""What fits the protocol's types is sent as it is; what does not is refused by name before anything is sent."""

import dataclasses
import math

import pytest

from stepahead.client import ChatMessage, GenerateOptions, GenerationRequest, InvalidRequestError
from stepahead.client.messages import (
    cancel_message,
    chat_prompt,
    check_timeout,
    generate_message,
    tokenize_message,
)
from stepahead.client.requests import make_request
from stepahead.v1 import generation_pb2


def message_of(prompt="hi", **options):
    return generate_message(make_request(prompt, **options))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "stopping.max_tokens"),
        ({"max_tokens": 2**32}, "stopping.max_tokens"),
        ({"max_tokens": 1.5}, "stopping.max_tokens"),
        ({"max_tokens": True}, "stopping.max_tokens"),
        ({"min_tokens": -1}, "stopping.min_tokens"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"seed": -1}, "sampling.seed"),
        ({"temperature": 1e39}, "sampling.temperature"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"top_k": 2**31}, "sampling.top_k"),
        ({"num_choices": -2}, "num_choices"),
        ({"stop": ["ok", 3]}, "stopping.stop_strings[1]"),
        ({"stop": "\ud800"}, "stopping.stop_strings[0]"),
        ({"stop_token_ids": [1, -1]}, "stopping.stop_token_ids[1]"),
        ({"request_id": 5}, "request_id"),
        ({"timeout": 0}, "scheduling.timeout_ms"),
        ({"timeout": math.nan}, "scheduling.timeout_ms"),
        ({"queue_timeout": -1.0}, "scheduling.queue_timeout_ms"),
        ({"repetition_penalty": "x"}, "sampling.repetition_penalty"),
        ({"logit_bias": {5: 1.0, -1: 1.0}}, "sampling.logit_bias[1].token_id"),
        ({"logit_bias": {5: "x"}}, "sampling.logit_bias[0].bias"),
        ({"logit_bias": [(5, 1.0)]}, "sampling.logit_bias"),
        ({"bad_words": [[1], [2, -1]]}, "sampling.bad_words[1][1]"),
        ({"bad_words": "x"}, "sampling.bad_words"),
        ({"bad_words": [1]}, "sampling.bad_words[0]"),
        ({"allowed_token_ids": [-1]}, "sampling.allowed_token_ids[0]"),
        ({"logprobs": -1}, "logprobs.output_top_k"),
        ({"prompt_logprobs": True}, "logprobs.prompt_top_k"),
        ({"processed_logprobs": 1}, "logprobs.kind"),
        ({"priority": 2**31}, "scheduling.priority"),
        ({"cache_salt": b"x"}, "scheduling.cache_salt"),
        ({"reattach_window": -1.0}, "scheduling.reattach_window_ms"),
        ({"json_schema": {"x": object()}}, "constraint.json_schema"),
        ({"json_object": "yes"}, "constraint.json_object"),
        ({"regex": 5}, "constraint.regex"),
        ({"choices": "yes"}, "constraint.choices.choices"),
        ({"prompt": [1, -1]}, "token_ids.ids[1]"),
        ({"prompt": [1, 2**32]}, "token_ids.ids[1]"),
        ({"prompt": "a\ud800"}, "text"),
        ({"prompt": [{"role": "user"}]}, "chat.messages[0]"),
        ({"prompt": [ChatMessage("user", None)]}, "chat.messages[0].content"),
    ],
)
def test_value_that_does_not_fit_is_named(options, field):
    with pytest.raises(InvalidRequestError) as caught:
        message_of(**{"prompt": "hi", **options})
    assert caught.value.field == field
    assert field in caught.value.message


def test_constraints_exclude_each_other_by_name():
    with pytest.raises(InvalidRequestError, match="regex and choices exclude each other") as caught:
        message_of(regex="a", choices=["a"], json_object=False, json_schema=None)
    assert caught.value.field == "constraint"


@pytest.mark.parametrize(
    ("options", "kind", "value"),
    [
        ({"json_schema": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"json_schema": {"enum": ["é"]}}, "json_schema", '{"enum": ["é"]}'),
        ({"json_schema": {}}, "json_schema", "{}"),
        ({"json_object": True}, "json_object", True),
        ({"regex": ""}, "regex", ""),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"choices": ["yes", "no"]}, "choices", generation_pb2.ChoiceConstraint(choices=["yes", "no"])),
        ({"choices": []}, "choices", generation_pb2.ChoiceConstraint()),
    ],
)
def test_a_constraint_is_sent_as_its_kind(options, kind, value):
    constraint = message_of(**options).constraint
    assert constraint.WhichOneof("kind") == kind
    assert getattr(constraint, kind) == value


def test_ways_to_draw_are_sent_and_unset_ones_stay_unset():
    assert not message_of().HasField("constraint")
    plain = message_of().sampling
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        assert not plain.HasField(name)
    message = message_of(
        repetition_penalty=1.5,
        logit_bias={7: -2.5},
        bad_words=[(1, 2)],
        allowed_token_ids=(4,),
        logprobs=0,
        priority=0,
    )
    assert message.sampling.repetition_penalty == 1.5
    assert [(each.token_id, each.bias) for each in message.sampling.logit_bias] == [(7, -2.5)]
    assert [list(each.ids) for each in message.sampling.bad_words] == [[1, 2]]
    assert list(message.sampling.allowed_token_ids) == [4]
    assert (message.logprobs.HasField("output_top_k"), message.logprobs.HasField("prompt_top_k")) == (True, False)
    assert message.scheduling.HasField("priority")


def test_only_a_request_that_outlives_its_call_gets_an_id():
    first, second = (generate_message(make_request("hi")) for _ in range(2))
    assert first.scheduling.reattach_window_ms == 30_000
    assert "" != first.request_id != second.request_id
    assert generate_message(make_request("hi", reattach_window=0)).request_id == ""
    multiplexed = message_of(reattach_window=5.0)
    assert (multiplexed.request_id != "", multiplexed.scheduling.reattach_window_ms) == (True, 5000)
    assert message_of(reattach_window=0).request_id == ""


def test_all_violations_are_reported_at_once():
    with pytest.raises(InvalidRequestError) as caught:
        message_of(max_tokens=-1, seed=-1)
    assert {each.field for each in caught.value.violations} == {"stopping.max_tokens", "sampling.seed"}


def test_edge_values_that_fit_are_left_to_the_server():
    message = message_of(
        max_tokens=0, temperature=math.nan, top_p=math.inf, top_k=-(2**31), seed=2**64 - 1, stop_token_ids=[0]
    )
    assert message.stopping.max_tokens == 0
    assert math.isnan(message.sampling.temperature)
    assert message.sampling.top_p == math.inf
    assert message.sampling.top_k == -(2**31)
    assert message.sampling.seed == 2**64 - 1


def test_empty_prompts_keep_their_kind_for_the_server_to_refuse():
    assert message_of("").WhichOneof("input") == "text"
    assert message_of([]).WhichOneof("input") == "token_ids"


def test_timeout_is_rounded_up_to_milliseconds():
    message = message_of(timeout=0.0001, queue_timeout=1.5)
    assert (message.scheduling.timeout_ms, message.scheduling.queue_timeout_ms) == (1, 1500)


def test_options_replace_those_of_a_ready_request():
    request = GenerationRequest(prompt="hi", max_tokens=3, seed=1)
    assert make_request(request, max_tokens=5) == GenerationRequest(prompt="hi", max_tokens=5, seed=1)


def test_options_mirror_the_request():
    names = {field.name for field in dataclasses.fields(GenerationRequest)} - {"prompt"}
    assert set(GenerateOptions.__annotations__) == names


@pytest.mark.parametrize("messages", ["hi", [], [1, 2]])
def test_chat_takes_turns_only(messages):
    with pytest.raises(InvalidRequestError) as caught:
        chat_prompt(messages)
    assert caught.value.field == "chat.messages"


def test_one_id_is_taken_as_a_list_of_one():
    assert list(cancel_message("abc").request_ids) == ["abc"]


def test_tokenize_takes_text_and_turns():
    assert tokenize_message("hi").text == "hi"
    assert tokenize_message([ChatMessage("user", "hi")]).chat.messages[0].content == "hi"


def test_timeout_none_means_none():
    assert check_timeout(None) is None
    with pytest.raises(InvalidRequestError):
        check_timeout(0.0)
