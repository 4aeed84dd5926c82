"""What a kernel needs of a machine: memory, copies, launches, a stream and events.

Two back ends stand behind it: `cupy_backend` (a GPU) and `host.backend` (this CPU, for tests). Memory is always a
torch tensor, shared by pointer; work goes to torch's current stream, so kernels and torch's own operations follow
each other without another synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.sources import Module, declarations

Argument = torch.Tensor | np.int32 | np.int64 | np.float32 | None
"""A tensor is passed as its address, None as a null pointer, a NumPy scalar by value with its own size."""

MAX_GRID = (2**31 - 1, 65535, 65535)
DEFAULT_SHARED_BYTES = 48 * 1024
"""A kernel that is given more dynamic shared memory must be told so before its launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of one kernel."""

    module: Module
    kernel: str
    grid: tuple[int, int, int]
    """Blocks in x, y, z. A launch without blocks is left out."""
    num_threads: int
    """Threads of a block."""
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return 0 in self.grid

    def check(self, device: torch.device) -> None:
        """Raises `KernelArgumentError` for sizes a device refuses and tensors of another device."""
        declared = {kernel.name: kernel for kernel in declarations(self.module.source)}
        if self.num_threads > declared[self.kernel].max_threads:
            message = f"{self.kernel}: {self.num_threads} threads, at most {declared[self.kernel].max_threads}"
            raise KernelArgumentError(message)
        if any(size > limit for size, limit in zip(self.grid, MAX_GRID, strict=True)):
            message = f"{self.kernel}: grid {self.grid}, at most {MAX_GRID}"
            raise KernelArgumentError(message)
        for place, argument in enumerate(self.arguments):
            if isinstance(argument, torch.Tensor) and argument.device != device:
                message = f"{self.kernel}: argument {place} is on {argument.device}, the kernel runs on {device}"
                raise KernelArgumentError(message)


class Event(Protocol):
    """A point in the stream."""

    def query(self) -> bool:
        """Whether everything submitted before it has ended."""
        ...

    def synchronize(self) -> None:
        """Waits until it has."""
        ...

    def ns_since(self, earlier: Event) -> int:
        """Nanoseconds by the device's clock since another event of the same back end; both have fired."""
        ...


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Submits it to the current stream in one call. It reads and writes the memory it was recorded with."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, in bytes."""

    total: int
    free: int
    """What an allocation could still get, cached memory included."""


class Stream(Protocol):
    """In-order work beside that of other streams."""

    def current(self) -> AbstractContextManager[object]:
        """Inside the block, this thread's work (torch's too) goes to this stream."""
        ...

    def wait(self, event: Event) -> None:
        """Holds work submitted later back until an event of the same back end has fired; the host does not wait."""
        ...


class Backend(Protocol):
    """Runs kernels."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory that is not initialised."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the current stream; either side may be on the host. Page-locked host memory does not block."""
        ...

    def upload(self, array: NDArray[np.generic], into: torch.Tensor | None = None) -> torch.Tensor:
        """Copies a host array to the device on the current stream. The host does not wait and may reuse the array.

        Args:
            array: any dtype torch has; contiguous.
            into: where to, of the same shape and dtype; None: into new memory.
        """
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns host memory that holds the tensor once an event recorded behind this call has fired."""
        ...

    def launch(self, launch: Launch) -> None:
        """Runs a kernel on the current stream.

        Raises:
            KernelUnavailable: it cannot be compiled or loaded here.
            KernelArgumentError: see `Launch.check`.
        """
        ...

    def create_stream(self) -> Stream:
        """Returns a new stream."""
        ...

    def record_event(self) -> Event:
        """An event behind everything submitted to the current stream."""
        ...

    def capture(self, body: Callable[[], object], beside: Graph | None = None) -> Graph:
        """Records the work that `body` submits; nothing runs yet.

        Args:
            body: has run once before (modules are loaded then), copies nothing between host and device, and leaves
                results only in memory allocated outside it.
            beside: a graph whose scratch memory this one may use too: they never run at the same time.
        """
        ...

    def forbid_waits(self) -> AbstractContextManager[object]:
        """Inside the block, an operation of this thread that makes the host wait for the device raises."""
        ...

    def memory(self) -> DeviceMemory:
        """Returns how much memory there is."""
        ...

    def peak_bytes(self, body: Callable[[], object]) -> int:
        """Runs `body`, waits for it, and returns the memory it held at its worst moment beyond what was there."""
        ...
