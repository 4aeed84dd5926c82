"""The back ends as a caller meets them: light imports, and typed errors where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stepahead.kernels.cuda.backend import Launch
from stepahead.kernels.cuda.cupy_backend import CupyBackend, _packed, cached_cubin
from stepahead.kernels.cuda.errors import KernelArgumentError, KernelUnavailable
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


class FakeCupy:
    """What `CupyBackend` asks of CuPy, written down instead of done."""

    def __init__(self):
        self.launches, self.shared, self.paths = [], None, []
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            Device=nullcontext,
            ExternalStream=lambda handle: nullcontext(self.launches.append(handle)),
        )

    def RawModule(self, path):  # noqa: N802 - CuPy's name
        self.paths.append(path)
        return SimpleNamespace(get_function=lambda name: FakeFunction(self, name))


class FakeFunction:
    def __init__(self, cupy, name):
        self.cupy, self.name = cupy, name

    def __call__(self, *arguments, shared_mem):
        self.cupy.launches.append((self.name, *arguments, shared_mem))

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)
        if name == "max_dynamic_shared_size_bytes":
            self.cupy.shared = value


def test_a_launch_reaches_cupy_on_torchs_stream(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPAHEAD_KERNEL_CACHE", str(tmp_path))
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    backend = CupyBackend()
    launch = Launch(
        module=Module("copy_blocks"),
        kernel="zero_blocks",
        grid=(3, 2, 1),
        num_threads=256,
        arguments=(None, None, np.int64(64), np.int64(4)),
    )
    backend.launch(launch)
    backend.launch(replace(launch, shared_bytes=60_000))
    backend.launch(replace(launch, grid=(3, 0, 1)))  # nothing to do
    assert fake.launches[:2] == [77, ("zero_blocks", (3, 2, 1), (256,), (0, 0, 64, 4), 0)]
    assert len(fake.launches) == 4
    assert fake.shared == 60_000
    (path,) = fake.paths  # loaded once
    assert path.startswith(str(tmp_path / "copy_blocks-"))
    with pytest.raises(KernelArgumentError, match="is on cpu"):
        backend.launch(replace(launch, arguments=(torch.zeros(1), *launch.arguments[1:])))
    with pytest.raises(KernelUnavailable, match="no GPU of that number; CUDA shows cuda:0, cuda:1"):
        CupyBackend(2)


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


def test_a_stream_of_the_host_has_always_finished():
    backend = HostBackend()
    stream, event = backend.create_stream(), backend.record_event()
    event.synchronize()
    with stream.current():
        stream.wait(event)
        assert backend.record_event().query()
