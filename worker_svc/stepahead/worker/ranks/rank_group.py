"""`RankGroup`: the ranks of a worker, connected by torch.distributed.

Tensors go by the back-end of the device, messages of the host by gloo. A rank that dies breaks the connections of
the others, whose calls then raise `RankLost`; one that hangs is the step watchdog's to find (`executor`).

On a GPU a sum whose other rank is gone never ends, and nobody may end it: what is launched behind it would run on
what it left, and tokens of that would be delivered. So rank 0 lets NCCL abort nothing (`_HANDLING`): its device
stays where it is until the process ends, which the host sees to. Another rank may be ended by NCCL's own watchdog.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType] - untyped upstream

from stepahead.kernels.cpu.host_arrays import as_tensor
from stepahead.worker.errors import ModelError, RankLost
from stepahead.worker.ranks.messages import Message, pack, unpack
from stepahead.worker.ranks.place import RankPlace

_dist: Any = torch.distributed  # partly typed upstream

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""By kind of device."""

CONNECT_TIMEOUT = timedelta(minutes=5)
_IDLE_TIMEOUT = timedelta(days=365)
"""How long a rank waits for the next step: a worker may be idle for as long as it likes."""

_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""After which NCCL ends a rank other than 0 whose device still waits for the others'. Waiting starts when it is
launched, at the same time on all ranks, so this bounds steps, not the time between them."""

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What NCCL's watchdog does after an error or a timeout. 0: it writes a log line; torch's default: it ends the
process."""

_FRAME_BYTES = 4096
"""A message and its length take one broadcast if they fit into this, as decode steps do, else two."""
_LENGTH_BYTES = 8

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankGroup:
    """Implements `Communicator`. One per process, from `connect`; one thread at a time calls it.

    Args:
        rank: of this process.
        size: number of ranks.
        host_group: that messages go by; None: the default group is one of the host.
        ordered_sums: sums are made in the order of ranks. A library adds in an order that depends on where in the
            tensor a value stands, so that the rows beside a row would show in its last bits.
    """

    def __init__(self, rank: int, size: int, host_group: object | None, *, ordered_sums: bool = False) -> None:
        self._rank = rank
        self._size = size
        self._host_group = host_group
        self._ordered_sums = ordered_sums

    @property
    def rank(self) -> int:
        """See `Communicator.rank`."""
        return self._rank

    @property
    def size(self) -> int:
        """See `Communicator.size`."""
        return self._size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        if not self._ordered_sums:
            _guarded(lambda: _dist.all_reduce(x))
            return x
        parts = [torch.empty_like(x) for _ in range(self._size)]
        _guarded(lambda: _dist.all_gather(parts, x))
        x.copy_(parts[0])
        for part in parts[1:]:
            x += part
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.broadcast`."""
        _guarded(lambda: _dist.broadcast(x, 0))
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See `Communicator.gather`."""
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else []
        _guarded(lambda: _dist.gather(x, parts or None))
        return parts

    def send(self, message: Message) -> None:
        """Sends a message from rank 0 to every other rank, which must be in `receive`. Raises `RankLost`."""
        data = pack(message)
        framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        self._tell(torch.frombuffer(bytearray(framed[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")), dtype=torch.uint8))
        if len(framed) > _FRAME_BYTES:
            self._tell(torch.frombuffer(bytearray(framed[_FRAME_BYTES:]), dtype=torch.uint8))

    def receive(self) -> Message:
        """Waits for the next message of rank 0. Raises `RankLost`."""
        frame = np.empty(_FRAME_BYTES, np.uint8)
        self._tell(as_tensor(frame))
        end = _LENGTH_BYTES + int.from_bytes(frame[:_LENGTH_BYTES].tobytes(), "little")
        if end > _FRAME_BYTES:
            rest = np.empty(end - _FRAME_BYTES, np.uint8)
            self._tell(as_tensor(rest))
            frame = np.concatenate([frame, rest])
        return unpack(frame[_LENGTH_BYTES:end].tobytes())

    def exchange(self, text: str) -> list[str]:
        """Returns every rank's text, in the order of ranks, on every rank. Raises `RankLost`."""
        data = np.frombuffer(bytearray(text.encode()), np.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        own = torch.tensor([len(data)])
        _guarded(lambda: _dist.all_gather(sizes, own, group=self._host_group))
        widest = max(int(size) for size in sizes)
        texts = [torch.zeros(widest, dtype=torch.uint8) for _ in range(self._size)]
        padded = torch.zeros(widest, dtype=torch.uint8)
        padded[: len(data)] = as_tensor(data)
        _guarded(lambda: _dist.all_gather(texts, padded, group=self._host_group))
        return [
            bytes(cast("list[int]", row[: int(size)].tolist())).decode()  # pyright: ignore[reportUnknownMemberType]
            for row, size in zip(texts, sizes, strict=True)
        ]

    def close(self) -> None:
        """Ends the connections, all ranks' if any rank closes."""
        _dist.destroy_process_group()

    def _tell(self, data: torch.Tensor) -> None:
        _guarded(lambda: _dist.broadcast(data, 0, group=self._host_group))


def connect(place: RankPlace, device: torch.device, *, ordered_sums: bool = False) -> RankGroup:
    """Waits for all ranks and connects them.

    Args:
        place: of this rank.
        device: where its tensors are.
        ordered_sums: see `RankGroup`.

    Raises:
        ModelError: some rank is not there in time, or they cannot reach each other.
    """
    if place.address in ("127.0.0.1", "localhost", "::1"):
        # Else gloo binds to what this machine's name resolves to, if it does: another address, or none.
        os.environ.setdefault(_GLOO_INTERFACE, _LOOPBACK)
        # NCCL too would meet at an address that other machines reach. With the sign it takes no longer name.
        os.environ.setdefault(_NCCL_INTERFACE, f"={_LOOPBACK}")
    backend = BACKENDS[device.type]
    options: dict[str, Any] = {"rank": place.rank, "world_size": place.size}
    try:
        if backend == "gloo":
            _dist.init_process_group(backend, store=_store(place), timeout=_IDLE_TIMEOUT, **options)
            host_group = None
        else:
            if place.rank == 0:
                os.environ.setdefault(_HANDLING, "0")
            # With its device named, NCCL connects now, not in the first step.
            _dist.init_process_group(
                backend, store=_store(place), timeout=_COLLECTIVE_TIMEOUT, device_id=device, **options
            )
            host_group = _dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = _reason(error)
        message = (
            f"the {place.size} ranks of this worker cannot be connected at {place.address}:{place.port}: {reason}"
        )
        raise ModelError(message) from error
    return RankGroup(place.rank, place.size, host_group, ordered_sums=ordered_sums)


def _store(place: RankPlace) -> object:
    """Returns the store in which ranks find each other's addresses."""
    if place.listen_fd is not None:
        # The socket listens already, on this machine only: torch itself would open the port on all addresses.
        return _dist.TCPStore(
            place.address,
            place.port,
            place.size,
            is_master=True,
            timeout=CONNECT_TIMEOUT,
            master_listen_fd=place.listen_fd,
        )
    find = cast("Callable[..., Any]", rendezvous)
    store, _, _ = next(find("env://", place.rank, place.size, timeout=CONNECT_TIMEOUT))
    return store


def _guarded(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise RankLost(f"the other ranks cannot be reached: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line of what torch says, and NCCL's own last one, which names the cause."""
    first, *more = str(error).splitlines() or [type(error).__name__]
    return " ".join([first, *more[-1:]] if "NCCL" in first else [first])
