"""Model files that are not whole: the file, its size, the size it should have, and what to do."""

import pytest

from stepahead.worker.errors import ModelError
from stepahead.worker.model.registry import make_runner
from tests.worker_model.gguf_files import write_gguf

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 1048576\n"


@pytest.fixture(params=["gguf", "safetensors"])
def file(request, tiny, tmp_path):
    """A whole model file in a folder of its own."""
    model = tiny("llama-mha")
    if request.param == "gguf":
        return write_gguf(tmp_path / "tiny.gguf", model, "llama")
    for path in model.path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path / "model.safetensors"


def fault_of(file) -> str:
    spec = file if file.suffix == ".gguf" else file.parent
    with pytest.raises(ModelError) as caught:
        make_runner(str(spec), dtype="float32", threads=1).load(lambda *call: None)
    return str(caught.value)


@pytest.mark.parametrize("missing", [1, 5000])
def test_a_cut_off_end_is_told_with_both_sizes(file, missing):
    whole = file.read_bytes()
    file.write_bytes(whole[:-missing])
    fault = fault_of(file)
    assert fault.startswith(f"{file} is cut short: it has {len(whole) - missing:,} bytes and should have ")
    assert fault.endswith("; download it again")
    expected = int(fault.partition("should have ")[2].partition(";")[0].replace(",", ""))
    # The last tensor of a GGUF file may be padded.
    assert len(whole) - 32 < expected <= len(whole)


@pytest.mark.parametrize("kept", [4, 6, 8, 24, 100, 300])
def test_a_cut_off_header_is_told(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    fault = fault_of(file)
    assert fault.startswith(str(file))
    assert "cut short" in fault
    assert "download it again" in fault


def test_an_empty_file_is_told(file):
    file.write_bytes(b"")
    assert fault_of(file) == f"{file} is empty; download it again"


def test_a_pointer_in_place_of_the_file_is_told(file):
    file.write_bytes(POINTER)
    assert fault_of(file).startswith(f"{file} is a pointer of Git LFS to a file of 1,048,576 bytes, not the file")
