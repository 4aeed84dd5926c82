"""Where the kernels cannot be compiled (no x86-64 Linux, no g++, no NVRTC) these tests are skipped, visibly."""

from __future__ import annotations

import pytest

from stepahead.kernels.cuda.errors import KernelUnavailable
from stepahead.kernels.cuda.host import build
from stepahead.kernels.cuda.nvrtc import nvrtc_version


@pytest.fixture(autouse=True, scope="session")
def compilers():
    try:
        build._compiler()
        nvrtc_version()
    except KernelUnavailable as error:
        pytest.skip(str(error))
