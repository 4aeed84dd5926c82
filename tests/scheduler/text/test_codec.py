"""Encoding text and conversations; scenario BL-21."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from stepahead.scheduler.text.chat_template import ChatTemplate
from stepahead.scheduler.text.choice_text import ChoiceText
from stepahead.scheduler.text.codec import ChatTurn, CodecSettings, TextCodec
from stepahead.scheduler.text.errors import BundleError, ChatTemplateError, EncodeError
from stepahead.scheduler.text.native import panics_as
from tests.scheduler.text.builders import byte_level, plain_pieces, with_bos

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with user') }}{% endif %}ok"
TOOLBOX = (
    "{{ bos_token }}{% set ns = namespace(seen=0) %}{% for message in messages %}{% if loop.index > 2 %}"
    "{% break %}{% endif %}{% set ns.seen = ns.seen + 1 %}{% generation %}{{ message | tojson }}{% endgeneration %}"
    "{% endfor %}{{ ns.seen }}{{ eos_token is defined }}{{ tools is none }}{{ {'a': '<b>'} | tojson(indent=2) }}"
)
TURNS = [ChatTurn("user", " hi "), ChatTurn("assistant", "hé"), ChatTurn("user", "a\nb")]


def now() -> datetime.datetime:
    return datetime.datetime(2025, 3, 4, tzinfo=datetime.UTC)


@pytest.mark.parametrize("template", [CHATML, STRICT, TOOLBOX], ids=["chatml", "strict", "toolbox"])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_gives_the_ids_of_transformers(template: str, prompt: bool):
    reference = PreTrainedTokenizerFast(tokenizer_object=with_bos(byte_level()), bos_token="<bos>")
    messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    expected = reference.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=prompt, return_dict=False
    )
    codec = TextCodec(with_bos(byte_level()), chat_template=ChatTemplate(template, {"bos_token": "<bos>"}))
    assert codec.encode_chat(TURNS, add_generation_prompt=prompt) == expected


def test_the_date_is_given_by_the_clock_passed_in():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=now)
    assert template.render(TURNS, add_generation_prompt=False) == "04 Mar 2025"


def test_the_default_clock_is_local_time():
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TURNS, add_generation_prompt=False)
    assert int(year) >= 2025


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].tool_calls[0].name }}", "no attribute 'tool_calls'"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
        ("{{ namespace(_x=1) }}", "underscore"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_failing_template_is_a_typed_error(source: str, message: str):
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render(TURNS, add_generation_prompt=False)


def test_the_rendered_size_is_bounded_while_rendering():
    template = ChatTemplate("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", {}, max_chars=100)
    with pytest.raises(ChatTemplateError, match="exceeds 100 characters"):
        template.render([ChatTurn("user", "12345")], add_generation_prompt=False)
    short = ChatTemplate("{{ messages[0].content }}", {}, max_chars=100)
    assert short.render([ChatTurn("user", "x" * 100)], add_generation_prompt=False) == "x" * 100


def test_a_template_that_does_not_compile_is_a_bundle_error():
    with pytest.raises(BundleError, match=r"chat_template\.jinja"):
        ChatTemplate("{% for %}", {})


def test_chat_without_a_template_is_refused():
    with pytest.raises(ChatTemplateError, match="no chat template"):
        TextCodec(byte_level()).encode_chat(TURNS, add_generation_prompt=True)


def test_encode_adds_what_the_post_processor_adds_and_chat_does_not():
    codec = TextCodec(with_bos(byte_level()), chat_template=ChatTemplate("{{ messages[0].content }}", {}))
    bos_id = byte_level().token_to_id("<bos>")
    plain = codec.encode_chat([ChatTurn("user", "abc")], add_generation_prompt=False)
    assert codec.encode("abc") == [bos_id, *plain]


@pytest.mark.parametrize("has_post_processor", [True, False])
def test_add_bos_token_means_exactly_one(has_post_processor: bool):
    tokenizer = with_bos(byte_level()) if has_post_processor else byte_level()
    bos_id = tokenizer.token_to_id("<bos>")
    codec = TextCodec(tokenizer, settings=CodecSettings(bos_token_id=bos_id, add_bos_token=True))
    assert codec.encode("").count(bos_id) == 1
    assert codec.encode("abc").count(bos_id) == 1


@pytest.mark.parametrize("text", ["", "\n", "  "])
def test_bl21_an_empty_text_has_no_ids_and_whitespace_is_text(text: str):
    codec = TextCodec(byte_level())
    assert (codec.encode(text) == []) == (text == "")


def test_a_lone_surrogate_is_refused():
    with pytest.raises(EncodeError, match="text: not valid Unicode"):
        TextCodec(byte_level()).encode("\ud800")


def test_k8_a_panic_of_the_native_code_is_a_typed_error():
    """The library's Strip panics on a token shorter than what it strips."""
    with pytest.raises(EncodeError, match="text: the tokenizer library failed"), panics_as(EncodeError, "text"):
        decoders.Strip("_", 1, 1).decode(["_"])
    with pytest.raises(KeyboardInterrupt), panics_as(EncodeError, "text"):
        raise KeyboardInterrupt


def test_a_word_the_tokenizer_cannot_take_is_a_typed_error():
    """A vocabulary without an unknown token; the library raises a bare Exception."""
    codec = TextCodec(Tokenizer(models.WordLevel({"once": 0}, unk_token="[UNK]")))
    assert codec.encode("once") == [0]
    with pytest.raises(EncodeError, match=r"text: the tokenizer cannot take it: .*\[UNK\]"):
        codec.encode("upon")


def test_ids_beyond_the_vocabulary_have_no_text():
    codec = plain_pieces(["x", "y"])
    assert codec.vocab_size == 2
    assert codec.decode([0, 5, 2**32 - 1, 1], skip_special_tokens=True) == "xy"


@pytest.mark.smollm2
def test_smollm2_round_trip_chat_and_stream():
    path = os.environ.get("STEPAHEAD_TEST_SMOLLM2")
    if path is None:
        pytest.skip("STEPAHEAD_TEST_SMOLLM2 names no GGUF file")
    reference = PreTrainedTokenizerFast.from_pretrained(Path(path).parent, gguf_file=Path(path).name)
    assert isinstance(reference.chat_template, str)
    codec = TextCodec(reference.backend_tokenizer, chat_template=ChatTemplate(reference.chat_template, {}))
    text = "The cat 😀 sat,\n\n  naïve 日本語 \u200d\u0915\u094d\t1234567.\n"
    ids = codec.encode(text)
    assert ids == reference.encode(text)
    choice = ChoiceText(codec)
    assert "".join([*(choice.push((token_id,)).text for token_id in ids), choice.finish()]) == text
    messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec.encode_chat(TURNS, add_generation_prompt=True) == expected
    for token_id in range(0, codec.vocab_size, 7):
        assert codec.decode([token_id], skip_special_tokens=False) == reference.backend_tokenizer.decode(
            [token_id], skip_special_tokens=False
        )
