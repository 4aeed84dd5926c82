"""Where the compiled step library comes from."""

import pytest

from stepahead.kernels.cpu.step.build import LIBRARY_ENV, BuildUnavailable, built_library


def test_a_named_library_is_taken_as_it_is(monkeypatch, tmp_path):
    """An image without a compiler carries the library that its build stage made."""
    library = tmp_path / "step.so"
    library.touch()
    monkeypatch.setenv(LIBRARY_ENV, str(library))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert built_library() == library


def test_a_named_library_that_is_missing_is_no_library(monkeypatch, tmp_path):
    monkeypatch.setenv(LIBRARY_ENV, str(tmp_path / "missing.so"))
    with pytest.raises(BuildUnavailable, match=r"names .*missing\.so, which is no file"):
        built_library()
