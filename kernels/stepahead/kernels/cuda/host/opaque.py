"""A host back end whose memory cannot be looked into, as a device's cannot without waiting for it. For tests.

On this CPU a runner that reads a tensor in the middle of a step, or mixes memory of the host and of the device,
just works; on a GPU it stops the stream or fails. Here both raise, and copies to the host arrive as late as they
may: when somebody waits for an event behind them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from stepahead.kernels.cuda.backend import Graph, Launch
from stepahead.kernels.cuda.errors import KernelError
from stepahead.kernels.cuda.host.backend import HostBackend, HostEvent, HostGraph

_LOOKS = frozenset(
    {
        *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"),
        *("__contains__", "nonzero", "equal", "allclose", "is_nonzero", "unique", "masked_select", "argwhere"),
        *("_local_scalar_dense", "__format__", "repeat_interleave"),
    }
)


class HostWait(KernelError):
    """The host would wait for a device, or memory of the host stands where the device's belongs."""


class OpaqueTensor(torch.Tensor):
    """Memory that only operations on the device may touch; what they return is as opaque."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in _LOOKS:
            message = f"{func.__name__} looks into memory of the device"
            raise HostWait(message)
        if func.__name__ == "where" and any(isinstance(argument, (int, float)) for argument in args):
            # torch copies the number to the device, and waits for that; `masked_fill` passes it along.
            raise HostWait("where copies a number to the device")
        for argument in _tensors((*args, *(kwargs or {}).values())):
            # A tensor without an axis travels as a number.
            if type(argument) is torch.Tensor and argument.dim():
                message = f"{func.__name__} takes memory of the host, {list(argument.shape)}, beside the device's"
                raise HostWait(message)
        return cast("Any", super()).__torch_function__(func, types, args, kwargs or {})


class OpaqueEvent(HostEvent):
    """An event; copies to the host in front of it arrive when it is looked at."""

    def __init__(self, backend: OpaqueBackend) -> None:
        super().__init__()
        self._backend = backend
        self._copies = backend.take_copies()

    @override
    def query(self) -> bool:
        """See `Event.query`."""
        self._land()
        return True

    @override
    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self._backend.check_wait("an event")
        self._land()

    def _land(self) -> None:
        with torch.inference_mode():
            while self._copies:
                host, values = self._copies.pop(0)
                host.copy_(values)


class OpaqueBackend(HostBackend):
    """See the module. `forbid_waits` counts for the thread that calls it.

    Args:
        checked: see `HostBackend`.
    """

    def __init__(self, *, checked: bool = False) -> None:
        super().__init__(checked=checked)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._thread = threading.local()
        self._records = False  # the body of a graph is at work
        self.num_replays = 0
        """Recorded graphs that were replayed."""

    @override
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Backend.allocate`."""
        return super().allocate(shape, dtype).as_subclass(OpaqueTensor)

    @override
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `Backend.copy`."""
        if type(source) is torch.Tensor or type(destination) is torch.Tensor:
            self.check_wait("a copy from or to memory that is not page-locked")
        with _transparent():
            super().copy(destination, source)

    @override
    def upload(self, array: NDArray[np.generic], into: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.upload`."""
        self._check_recordable("upload")
        plain: torch.Tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
        memory = self.allocate(tuple(plain.shape), plain.dtype) if into is None else into
        with _transparent():
            memory.copy_(plain)
        return memory

    @override
    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Backend.download`."""
        self._check_recordable("download")
        with _transparent():
            values = tensor.clone().as_subclass(torch.Tensor)
        host = super().allocate(tuple(values.shape), values.dtype)
        self._copies.append((host, values))
        return host

    @override
    def launch(self, launch: Launch) -> None:
        """See `Backend.launch`."""
        for argument in launch.arguments:
            if type(argument) is torch.Tensor:
                message = f"{launch.kernel} takes memory of the host, {list(argument.shape)}"
                raise HostWait(message)
        with _transparent():
            super().launch(launch)

    @override
    def record_event(self) -> OpaqueEvent:
        """See `Backend.record_event`."""
        return OpaqueEvent(self)

    @override
    def capture(self, body: Callable[[], object], beside: Graph | None = None) -> HostGraph:
        """See `Backend.capture`."""

        def counted() -> None:
            self.num_replays += 1
            self._records = True
            try:
                body()
            finally:
                self._records = False

        return HostGraph(counted)

    @override
    @contextmanager
    def forbid_waits(self) -> Generator[None]:
        """See `Backend.forbid_waits`."""
        before = self._waits_forbidden
        self._thread.forbidden = True
        try:
            yield
        finally:
            self._thread.forbidden = before

    def take_copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the copies to the host, target and values, since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def check_wait(self, what: str) -> None:
        """Raises `HostWait` where this thread may not wait."""
        if self._waits_forbidden:
            message = f"the host waits for {what}"
            raise HostWait(message)

    def _check_recordable(self, what: str) -> None:
        if self._records:
            message = f"recorded work makes an {what}: a replay would repeat the old values"
            raise HostWait(message)

    @property
    def _waits_forbidden(self) -> bool:
        return getattr(self._thread, "forbidden", False)


def _transparent() -> AbstractContextManager[object]:
    """Inside the block an opaque tensor is a plain one. torch documents no public name for it."""
    return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore[reportPrivateUsage]


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(tuple(cast("list[Any]", value)))
