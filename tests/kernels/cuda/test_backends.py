"""The back ends as a caller meets them: light imports, and typed errors where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from stepahead.kernels.cuda.cupy_backend import CupyBackend, _packed, cached_cubin
from stepahead.kernels.cuda.errors import KernelUnavailable
from stepahead.kernels.cuda.host.backend import HostBackend
from stepahead.kernels.cuda.sources import Module

IMPORT_ALL = """
import importlib, pkgutil, sys
import stepahead.kernels.cuda as package
sys.modules["cupy"] = None  # an import of it fails
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""


def test_everything_imports_without_cupy():
    subprocess.run([sys.executable, "-c", IMPORT_ALL], check=True, timeout=100)


def test_importing_the_packages_imports_neither_torch_nor_cupy():
    code = "import sys, stepahead.kernels, stepahead.kernels.cuda; assert not {'torch', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_what_is_missing():
    with pytest.raises(KernelUnavailable, match=r"CuPy is not installed|no CUDA device"):
        CupyBackend()


def test_a_binary_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPAHEAD_KERNEL_CACHE", str(tmp_path))
    path = cached_cubin(Module("write_kv"), "sm_90")
    assert path.read_bytes()[:4] == b"\x7fELF"
    path.write_bytes(b"as it was")
    assert cached_cubin(Module("write_kv"), "sm_90").read_bytes() == b"as it was"
    other = cached_cubin(Module("write_kv"), "sm_80")
    assert other != path
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_arguments_keep_their_size():
    tensor = torch.zeros(3)
    assert _packed(tensor) == np.uint64(tensor.data_ptr())
    assert [_packed(value).itemsize for value in (None, tensor, np.int32(1), np.float32(1), np.int64(1))] == [
        8,
        8,
        4,
        4,
        8,
    ]


def test_allocated_memory_of_the_host_is_poisoned():
    memory = HostBackend().allocate((2, 3), torch.bfloat16)
    assert torch.isnan(memory).all()
    assert HostBackend().allocate((4,), torch.int32).eq(-1).all()
    assert HostBackend().record_event().query()
