"""Tokenizer bundles: what is in them, and that the same model gives the same bytes."""

import io
import json
import os
import subprocess
import sys
import zipfile
from contextlib import closing

import pytest
import tokenizers

from stepahead.worker.errors import ModelError
from stepahead.worker.model.bundle import BundleFields, write_bundle
from stepahead.worker.model.checkpoint import open_checkpoint
from stepahead.worker.model.registry import make_runner
from stepahead.worker.model.tokenizer_bundle import split_digits
from tests.worker_model.gguf_files import write_gguf

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def unpacked(bundle):
    archive = zipfile.ZipFile(io.BytesIO(bundle))
    members = {name: archive.read(name).decode() for name in archive.namelist()}
    return members, json.loads(members["bundle.json"])


def byte_level_tokenizer(add_bos):
    """A byte-level BPE over single bytes and three special tokens."""
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture
def directory(tiny, tmp_path):
    """Returns a function that saves a tiny model with a tokenizer."""
    import transformers

    def save(*, add_bos=False, template=None, generation=None):
        tiny("llama-mha").model.save_pretrained(tmp_path)
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_level_tokenizer(add_bos), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        fast.chat_template = template
        fast.save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9], **(generation or {})}))
        return tmp_path

    return save


def bundle_of(path):
    with closing(open_checkpoint(str(path))) as checkpoint:
        return checkpoint.tokenizer_bundle()


def loaded_bundle(path):
    return make_runner(str(path), threads=1).load(lambda *call: None).tokenizer_bundle


@pytest.mark.parametrize("add_bos", [False, True])
def test_directory_bundle(directory, add_bos):
    generation = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "top_k": None}
    bundle = bundle_of(directory(add_bos=add_bos, template=TEMPLATE, generation=generation))
    members, fields = unpacked(bundle)
    assert fields == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
        "bos_token_id": 1,
        "eos_token_ids": [2, 9],
        "add_bos_token": add_bos,
        "generation_defaults": {"temperature": 0.6, "top_p": 0.9},
    }
    assert members["chat_template.jinja"] == TEMPLATE
    tokenizer = tokenizers.Tokenizer.from_str(members["tokenizer.json"])
    ids = tokenizer.encode("grüße 12").ids
    assert (ids[0] == 1) == add_bos
    assert tokenizer.decode(ids) == "grüße 12"


def test_no_template_no_member(directory):
    assert sorted(unpacked(bundle_of(directory()))[0]) == ["bundle.json", "tokenizer.json"]


def test_bytes_are_deterministic(directory):
    path = directory(template=TEMPLATE)
    assert bundle_of(path) == bundle_of(path) == loaded_bundle(path)
    fields = BundleFields(eos_token_ids=(1,))
    assert write_bundle("{}", fields, "x") == write_bundle("{}", fields, "x")


def test_broken_tokenizer_is_a_model_error(directory):
    path = directory()
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NoSuchTokenizer"}))
    with pytest.raises(ModelError, match="tokenizer of") as own:
        bundle_of(path)
    with pytest.raises(ModelError, match="tokenizer of") as loaded:
        loaded_bundle(path)
    assert str(loaded.value) == str(own.value)


def test_a_tokenizer_is_read_in_a_process_of_its_own(directory, monkeypatch):
    """`transformers` would stay in the worker's memory; one that fails is told, none is started in vain."""
    path = directory()
    code = (
        "import sys; from stepahead.worker.model.registry import make_runner; "
        "bundle = make_runner(sys.argv[1], threads=1).load(lambda *call: None).tokenizer_bundle; "
        "sys.exit(not bundle or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match=r"the process that reads the tokenizer of .* ended with 1"):
        loaded_bundle(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).unlink()
    assert loaded_bundle(path) == b""


def test_a_process_whose_bundle_nobody_wants_ends(tmp_path):
    """Whatever it is doing: here it reads a configuration that never comes."""
    os.mkfifo(tmp_path / "config.json")
    read_fd, write_fd = os.pipe()
    argv = [sys.executable, "-m", "stepahead.worker.model.bundle_process", str(tmp_path), str(write_fd)]
    with subprocess.Popen(argv, pass_fds=(write_fd,)) as process:
        os.close(write_fd)
        os.close(read_fd)
        assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("variant", "architecture"), [("smollm3-file", "smollm3"), ("gemma", "gemma"), ("phi3", "phi3")]
)
def test_gguf_bundle_of_every_kind_of_architecture(tiny, tmp_path, variant, architecture):
    vocabulary = byte_level_tokenizer(add_bos=False).get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "12"]
    extra = [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "llama-bpe"),
        ("add_token_list", tokens),
        ("add_token_types", [3] * 3 + [1] * (len(tokens) - 3)),
        ("add_token_merges", ["1 2"]),
        ("add_chat_template", TEMPLATE),
        ("add_sampling_top_p", 0.5),
    ]
    path = write_gguf(tmp_path / "tiny.gguf", tiny(variant), architecture, extra=extra)
    members, fields = unpacked(bundle_of(path))
    assert members["chat_template.jinja"] == TEMPLATE
    assert fields["generation_defaults"] == {"top_p": 0.5}
    tokenizer = tokenizers.Tokenizer.from_str(members["tokenizer.json"])
    assert tokenizer.decode(tokenizer.encode("grüße 12").ids) == "grüße 12"


def test_gguf_bundle_splits_digits_for_smollm(tiny, tmp_path):
    vocabulary = byte_level_tokenizer(add_bos=False).get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "12", "Ġ1"]
    extra = [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "smollm"),
        ("add_token_list", tokens),
        ("add_token_types", [3] * 3 + [1] * (len(tokens) - 3)),
        ("add_token_merges", ["1 2", "Ġ 1"]),
        ("add_unk_token_id", 0),
        ("add_add_bos_token", False),
        ("add_chat_template", TEMPLATE),
        ("add_sampling_temp", 0.5),
        ("add_sampling_top_k", 20),
    ]
    members, fields = unpacked(
        bundle_of(write_gguf(tmp_path / "tiny.gguf", tiny("llama-mha"), "llama", extra=extra))
    )
    assert (fields["bos_token"], fields["eos_token"], fields["eos_token_ids"]) == ("<s>", "</s>", [2])
    assert fields["generation_defaults"] == {"temperature": 0.5, "top_k": 20}
    assert members["chat_template.jinja"] == TEMPLATE
    tokenizer = tokenizers.Tokenizer.from_str(members["tokenizer.json"])
    assert "12" not in tokenizer.encode("a 12", add_special_tokens=False).tokens
    assert tokenizer.decode(tokenizer.encode("a 12 é").ids) == "a 12 é"


def test_split_digits_leaves_other_pre_tokenizers():
    other = json.dumps({"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}})
    assert json.loads(split_digits(other)) == json.loads(other)


def test_a_toy_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from stepahead.worker.model.registry import make_runner; "
        "make_runner('toy:tagged').load(lambda *call: None); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
