"""The GPU behind the back-end interface: NVRTC compiles, CuPy loads and launches, torch owns memory and streams.

CuPy is imported when a `CupyBackend` is made, never before: a machine without it can import everything else.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cpu.step.build import cache_directory
from stepahead.kernels.cuda.backend import DEFAULT_SHARED_BYTES, DeviceMemory, Launch
from stepahead.kernels.cuda.errors import KernelUnavailable
from stepahead.kernels.cuda.nvrtc import compile_module, nvrtc_version
from stepahead.kernels.cuda.sources import Module, sources_digest

if TYPE_CHECKING:
    from stepahead.kernels.cuda.backend import Argument, Event, Graph


class TorchStream:
    """A CUDA stream of torch's; kernels follow it because `CupyBackend.launch` asks torch for the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def current(self) -> AbstractContextManager[object]:
        """See `Stream.current`."""
        return torch.cuda.stream(self._stream)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        self._stream.wait_event(cast("TorchEvent", event).event)


class TorchEvent:
    """An event of torch's. A thread that waits for it sleeps: a spinning one would take a core from the host's."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(torch.cuda.current_stream(device))

    def query(self) -> bool:
        """See `Event.query`."""
        return self.event.query()

    def synchronize(self) -> None:
        """See `Event.synchronize`. Lets other threads run meanwhile."""
        self.event.synchronize()

    def ns_since(self, earlier: Event) -> int:
        """See `Event.ns_since`."""
        return round(cast("TorchEvent", earlier).event.elapsed_time(self.event) * 1e6)


class CupyBackend:
    """Kernels on one GPU.

    Args:
        device_index: of the GPU, as torch counts.

    Raises:
        KernelUnavailable: CuPy, the driver or the GPU is missing.
    """

    def __init__(self, device_index: int = 0) -> None:
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise KernelUnavailable("CuPy is not installed (pip install 'stepahead[cuda]')") from error
        if not self._cupy.cuda.is_available() or not torch.cuda.is_available():
            raise KernelUnavailable("there is no CUDA device, or torch was built without CUDA")
        if device_index >= torch.cuda.device_count():
            raise KernelUnavailable(f"there is no GPU of that number; CUDA shows {', '.join(visible_gpus())}")
        self._device = torch.device("cuda", device_index)
        major, minor = torch.cuda.get_device_capability(self._device)
        self._architecture = f"sm_{major}{minor}"
        self._functions: dict[tuple[Module, str], Any] = {}

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._device

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Backend.allocate`."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `Backend.copy`."""
        destination.copy_(source, non_blocking=True)

    def upload(self, array: NDArray[np.generic], into: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.upload`. torch's cache of page-locked memory knows when the device has read a copy."""
        plain: torch.Tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
        pinned = plain.pin_memory()
        if into is None:
            return pinned.to(self._device, non_blocking=True)
        return into.copy_(pinned, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Backend.download`."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def launch(self, launch: Launch) -> None:
        """See `Backend.launch`."""
        launch.check(self._device)
        if launch.is_empty:
            return
        function = self._function(launch.module, launch.kernel)
        if launch.shared_bytes > DEFAULT_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = launch.shared_bytes
        arguments = tuple(_packed(argument) for argument in launch.arguments)
        handle = torch.cuda.current_stream(self._device).cuda_stream
        with self._cupy.cuda.Device(self._device.index), self._cupy.cuda.ExternalStream(handle):
            function(launch.grid, (launch.num_threads,), arguments, shared_mem=launch.shared_bytes)

    def create_stream(self) -> TorchStream:
        """See `Backend.create_stream`."""
        return TorchStream(self._device)

    def record_event(self) -> TorchEvent:
        """See `Backend.record_event`."""
        return TorchEvent(self._device)

    def capture(self, body: Callable[[], object], beside: Graph | None = None) -> torch.cuda.CUDAGraph:
        """See `Backend.capture`. The current stream must not be the default one."""
        graph = torch.cuda.CUDAGraph()
        # Taken from a graph that lives: a pool is gone with its last graph.
        pool = None if beside is None else cast("torch.cuda.CUDAGraph", beside).pool()
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            body()
        return graph

    @contextmanager
    def forbid_waits(self) -> Generator[None]:
        """See `Backend.forbid_waits`. torch notices its own operations, in every thread."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def memory(self) -> DeviceMemory:
        """See `Backend.memory`."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total=total, free=free)

    def peak_bytes(self, body: Callable[[], object]) -> int:
        """See `Backend.peak_bytes`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        body()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def _function(self, module: Module, kernel: str) -> Any:  # noqa: ANN401 - CuPy has no types
        key = (module, kernel)
        if key not in self._functions:
            with self._cupy.cuda.Device(self._device.index):
                loaded = self._cupy.RawModule(path=str(cached_cubin(module, self._architecture)))
                self._functions[key] = loaded.get_function(kernel)
        return self._functions[key]


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use, by torch's names."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def cached_cubin(module: Module, architecture: str) -> Path:
    """Returns a file with the module's machine code, compiled unless the cache holds it.

    Raises:
        KernelUnavailable: NVRTC is not installed.
        KernelBuildError: the source does not compile.
    """
    key = (sources_digest(), nvrtc_version(), architecture, str(module.definitions))
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:24]
    path = cache_directory() / f"{module.source}-{digest}.cubin"
    if not path.exists():
        compiled = compile_module(module, architecture)
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(compiled.cubin)
        Path(file.name).replace(path)  # on one file system: a reader sees all of it or nothing
    return path


def _packed(argument: Argument) -> np.generic:
    """A kernel argument as CuPy passes it with the right size: a plain Python number would always be 8 bytes."""
    if argument is None:
        return np.uint64(0)
    return np.uint64(argument.data_ptr()) if isinstance(argument, torch.Tensor) else argument
