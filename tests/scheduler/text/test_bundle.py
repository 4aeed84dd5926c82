"""The tokenizer bundle: what is read, what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile

import pytest
from tokenizers import Tokenizer, decoders

from stepahead.scheduler.text import bundle
from stepahead.scheduler.text.bundle import load_bundle
from stepahead.scheduler.text.codec import ChatTurn
from stepahead.scheduler.text.errors import BundleError
from tests.scheduler.text.builders import bundle_bytes, bundle_entries, byte_level, word_level

FIELDS: dict[str, object] = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": None,
    "bos_token_id": 7,
    "eos_token_ids": [8, 9],
    "add_bos_token": False,
    "generation_defaults": {"temperature": 0.6},
    "from_a_newer_worker": True,
}
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def good_entries() -> dict[str, str | bytes]:
    return {**bundle_entries(byte_level(), FIELDS, TEMPLATE), "README": "ignored"}


def test_a_bundle_is_read_completely():
    data = bundle_bytes(good_entries())
    codec = load_bundle(data, hashlib.sha256(data).hexdigest().upper())
    assert codec.has_chat_template
    assert dict(codec.generation_defaults) == {"temperature": 0.6}
    assert codec.settings.bos_token_id == 7
    assert codec.settings.eos_token_ids == (8, 9)
    assert codec.vocab_size == byte_level().get_vocab_size()
    assert codec.decode(codec.encode("é abc"), skip_special_tokens=True) == "é abc"
    ids = codec.encode_chat([ChatTurn("user", "hi")], add_generation_prompt=True)
    assert codec.decode(ids, skip_special_tokens=False) == "<bos>hi"


def test_only_two_entries_are_required():
    codec = load_bundle(bundle_bytes(bundle_entries(word_level(), {})), None)
    assert not codec.has_chat_template
    assert dict(codec.generation_defaults) == {}
    assert codec.settings.eos_token_ids == ()


@pytest.mark.parametrize("name", ["tokenizer.json", "bundle.json"])
def test_a_missing_entry_is_named(name: str):
    entries = good_entries()
    del entries[name]
    with pytest.raises(BundleError, match=f"{name} is missing"):
        load_bundle(bundle_bytes(entries), None)


def test_a_wrong_digest_is_refused():
    with pytest.raises(BundleError, match="sha256"):
        load_bundle(bundle_bytes(good_entries()), "0" * 64)


@pytest.mark.parametrize("name", ["../up.json", "/root.json", "dir/file", "dir\\file", "c:file", "..", "dir/"])
def test_a_name_that_is_no_plain_file_name_is_refused(name: str):
    with pytest.raises(BundleError, match="not a plain file name"):
        load_bundle(bundle_bytes({**good_entries(), name: "x"}), None)


def test_a_name_that_occurs_twice_is_refused():
    buffer = io.BytesIO(bundle_bytes(good_entries()))
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("README", "again")
    with pytest.raises(BundleError, match="occurs twice"):
        load_bundle(buffer.getvalue(), None)


@pytest.mark.parametrize(("num_extra", "refused"), [(46, False), (47, True)])
def test_the_number_of_entries_is_limited(num_extra: int, refused: bool):
    entries = {**good_entries(), **{f"extra{index}": "" for index in range(num_extra)}}
    assert (len(entries) > bundle.MAX_ENTRIES) == refused
    if refused:
        with pytest.raises(BundleError, match="51 entries, at most 50"):
            load_bundle(bundle_bytes(entries), None)
    else:
        load_bundle(bundle_bytes(entries), None)


def test_the_unpacked_size_is_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "MAX_UNPACKED_BYTES", 10_000)
    with pytest.raises(BundleError, match="unpacked, at most 10000"):
        load_bundle(bundle_bytes({**good_entries(), "bomb": b"\0" * 10_000}), None)


def test_an_entry_larger_than_its_header_says_is_refused():
    data = bytearray(bundle_bytes({"tokenizer.json": "x" * 1000}))
    for position in range(len(data) - 4):
        if data[position : position + 4] == struct.pack("<I", 1000):
            data[position : position + 4] = struct.pack("<I", 10)
    with pytest.raises(BundleError, match="damaged archive"):
        load_bundle(bytes(data), None)


def test_an_encrypted_entry_is_refused():
    data = bytearray(bundle_bytes(good_entries()))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(BundleError, match="is encrypted"):
        load_bundle(bytes(data), None)


@pytest.mark.parametrize("cut", [0, 10, 200])
def test_a_damaged_archive_is_refused(cut: int):
    with pytest.raises(BundleError, match="damaged archive"):
        load_bundle(bundle_bytes(good_entries())[:cut], None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bos_token", 1),
        ("bos_token_id", -1),
        ("bos_token_id", True),
        ("bos_token_id", "1"),
        ("eos_token_ids", 2),
        ("eos_token_ids", [2, 2**32]),
        ("eos_token_ids", ""),
        ("add_bos_token", 0),
        ("generation_defaults", []),
    ],
)
def test_a_field_of_the_wrong_type_is_named(field: str, value: object):
    entries = bundle_entries(byte_level(), {**FIELDS, field: value}, TEMPLATE)
    with pytest.raises(BundleError, match=f"bundle.json: {field} is not"):
        load_bundle(bundle_bytes(entries), None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bundle.json", "{", "bundle.json: "),
        ("bundle.json", "[]", "bundle.json: not an object"),
        ("bundle.json", b"\xff", "bundle.json: "),
        ("tokenizer.json", "{}", "tokenizer.json: "),
        ("tokenizer.json", b"\xff", "tokenizer.json: "),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja: "),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: "),
    ],
)
def test_a_damaged_entry_is_named(name: str, content: str | bytes, message: str):
    with pytest.raises(BundleError, match=message):
        load_bundle(bundle_bytes({**good_entries(), name: content}), None)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Strip(" ", 0, 1), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("a", "b")]),
    ],
    ids=["ctc", "suffix", "replace_whole", "strip_end", "strip_token_end", "replace_bytes"],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: decoders.Decoder):
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    with pytest.raises(BundleError, match=r"decoder stage .* is not supported"):
        load_bundle(bundle_bytes(bundle_entries(tokenizer, {})), None)


def test_truncation_and_padding_of_the_training_run_are_switched_off():
    tokenizer = word_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=6)
    fields = json.loads(tokenizer.to_str())
    assert fields["truncation"]
    assert fields["padding"]
    codec = load_bundle(bundle_bytes(bundle_entries(Tokenizer.from_str(json.dumps(fields)), {})), None)
    assert codec.encode("the cat the cat") == [1, 2, 1, 2]
