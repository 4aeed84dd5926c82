"""The back end that runs kernels on this CPU: one block at a time, every thread a fiber. For tests only.

What it shows: results, missing barriers (thread orders that permute), divergent barriers, and with `checked` also
races and accesses out of bounds. What it cannot show: speed, occupancy, memory ordering between blocks, and the
last bit of expf or of a tensor core's sum.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from stepahead.kernels.cuda.backend import DeviceMemory, Event, Graph, Launch
from stepahead.kernels.cuda.errors import KernelFault
from stepahead.kernels.cuda.host.build import built_module

HOST_MEMORY_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A line that orders memory: a barrier, or a wait for copies."""

    file: str
    line: int

    @override
    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class HostEvent:
    """An event of a stream that has always finished."""

    def __init__(self) -> None:
        self._at_ns = time.monotonic_ns()

    def query(self) -> bool:
        """Whether everything submitted before it has ended."""
        return True

    def synchronize(self) -> None:
        """Waits until it has."""

    def ns_since(self, earlier: Event) -> int:
        """See `Event.ns_since`."""
        return self._at_ns - cast("HostEvent", earlier)._at_ns


class HostGraph:
    """A body that runs again."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._body()


class HostStream:
    """A stream whose work ends before the next is submitted."""

    def current(self) -> AbstractContextManager[object]:
        """See `Stream.current`."""
        return nullcontext()

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        assert event.query(), "work on the host has ended when it is submitted"


class HostBackend:
    """Kernels on this CPU.

    Args:
        checked: faults for races and for accesses out of bounds; much slower.
        seed: 0 runs ready threads in ascending order, another seed in orders that permute.
        skipped: the barrier to leave out, to see whether anybody notices.
    """

    def __init__(self, *, checked: bool = False, seed: int = 0, skipped: Site | None = None) -> None:
        self._num_allocated = 0
        self._checked = checked
        self._seed = seed
        self._skipped = skipped
        self.sites: set[tuple[str, Site]] = set()
        """(kernel, site) of every line that ordered memory so far."""
        self.kernels: set[str] = set()
        """Kernels that ran so far."""

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Backend.allocate`; filled with ones in every bit (NaN, -1), so that a read before a write shows."""
        memory = torch.empty(shape, dtype=dtype)
        self._num_allocated += memory.numel() * memory.element_size()
        memory.view(-1).view(torch.uint8).fill_(0xFF)
        return memory

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `Backend.copy`."""
        destination.copy_(source)

    def upload(self, array: NDArray[np.generic], into: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.upload`."""
        plain: torch.Tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
        memory = self.allocate(tuple(plain.shape), plain.dtype) if into is None else into
        self.copy(memory, plain)
        return memory

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Backend.download`."""
        return tensor.clone()

    def create_stream(self) -> HostStream:
        """See `Backend.create_stream`."""
        return HostStream()

    def record_event(self) -> HostEvent:
        """See `Backend.record_event`."""
        return HostEvent()

    def capture(self, body: Callable[[], object], beside: Graph | None = None) -> HostGraph:
        """See `Backend.capture`."""
        return HostGraph(body)

    def forbid_waits(self) -> AbstractContextManager[object]:
        """See `Backend.forbid_waits`: nothing waits for a device that has always finished."""
        return nullcontext()

    def memory(self) -> DeviceMemory:
        """See `Backend.memory`: so little that a cache that fills it is made in no time."""
        return DeviceMemory(total=HOST_MEMORY_BYTES, free=HOST_MEMORY_BYTES)

    def peak_bytes(self, body: Callable[[], object]) -> int:
        """See `Backend.peak_bytes`: at most what the body allocates in all."""
        before = self._num_allocated
        body()
        return self._num_allocated - before

    def launch(self, launch: Launch) -> None:
        """See `Backend.launch`.

        Raises:
            KernelFault: the kernel broke a rule; the message says which, and where.
        """
        launch.check(self.device)
        if launch.is_empty:
            return
        library = _opened(built_module(launch.module, checked=self._checked))
        watched: list[int] = []
        values: list[np.generic] = []
        for argument in launch.arguments:
            if isinstance(argument, torch.Tensor):
                watched += (argument.data_ptr(), _extent_bytes(argument))
                values.append(np.uint64(argument.data_ptr()))
            else:
                values.append(np.uint64(0) if argument is None else argument)
        boxes = [np.array(value) for value in values]
        count = len(boxes)
        addresses = (ctypes.c_void_p * count)(*(box.ctypes.data for box in boxes))
        sizes = (ctypes.c_int * count)(*(box.itemsize for box in boxes))
        grid_block = (ctypes.c_uint * 6)(*launch.grid, launch.num_threads, 1, 1)
        library.on_host_watch((ctypes.c_uint64 * len(watched))(*watched), len(watched) // 2)
        skipped = self._skipped or Site("", 0)
        library.on_host_skip(skipped.file.encode(), skipped.line)
        run = getattr(library, f"launch_{launch.kernel}")
        run.restype = ctypes.c_char_p
        shared_bytes, seed = ctypes.c_size_t(launch.shared_bytes), ctypes.c_uint(self._seed)
        fault = run(grid_block, shared_bytes, seed, addresses, sizes, count)
        self.kernels.add(launch.kernel)
        self.sites |= {(launch.kernel, site) for site in _executed(library)}
        if fault:
            raise KernelFault(f"{launch.module}, {launch.kernel}: {fault.decode()}")


def _executed(library: ctypes.CDLL) -> list[Site]:
    sites: list[Site] = []
    file = ctypes.c_char_p()
    while line := int(library.on_host_site(len(sites), ctypes.byref(file))):
        sites.append(Site((file.value or b"").decode(), line))
    return sites


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first value to behind its last, gaps of a view included."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@cache
def _opened(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
