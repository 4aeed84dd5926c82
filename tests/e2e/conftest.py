"""Models that several modules use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.byte_model import save_byte_model


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `byte_model.py`; made once per session."""
    return save_byte_model(tmp_path_factory.mktemp("byte-model"))
