"""`RankGroup`: the ranks of a worker, connected by torch.distributed.

Tensors go by the back-end of the device, messages of the host by gloo. A rank that dies breaks the connections of
the others, whose calls then raise `RankLost`; one that hangs is the step watchdog's to find (`executor`).
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

_FRAME_BYTES = 4096
"""A message and its length take one broadcast if they fit into this, as decode steps do, else two."""
_LENGTH_BYTES = 8

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankGroup:
    """Implements `Communicator`. One per process, from `connect`; every method on the thread that connected."""

    def __init__(self, rank: int, size: int, host_group: object | None) -> None:
        self._rank = rank
        self._size = size
        self._host_group = host_group  # None: the default group is one of the host

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
        _guarded(lambda: _dist.all_reduce(x))
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
        self._broadcast(
            torch.frombuffer(bytearray(framed[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")), dtype=torch.uint8)
        )
        if len(framed) > _FRAME_BYTES:
            self._broadcast(torch.frombuffer(bytearray(framed[_FRAME_BYTES:]), dtype=torch.uint8))

    def receive(self) -> Message:
        """Waits for the next message of rank 0. Raises `RankLost`."""
        frame = np.empty(_FRAME_BYTES, np.uint8)
        self._broadcast(as_tensor(frame))
        end = _LENGTH_BYTES + int.from_bytes(frame[:_LENGTH_BYTES].tobytes(), "little")
        if end > _FRAME_BYTES:
            rest = np.empty(end - _FRAME_BYTES, np.uint8)
            self._broadcast(as_tensor(rest))
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

    def _broadcast(self, data: torch.Tensor) -> None:
        _guarded(lambda: _dist.broadcast(data, 0, group=self._host_group))


def connect(place: RankPlace, device: str) -> RankGroup:
    """Waits for all ranks and connects them; the calling thread is the one to use the group.

    Args:
        place: of this rank.
        device: "cpu" or "cuda".

    Raises:
        ModelError: some rank is not there in time, or they cannot reach each other.
    """
    if place.address in ("127.0.0.1", "localhost", "::1"):
        # Else gloo binds to what this machine's name resolves to, if it does: another address, or none.
        os.environ.setdefault(_GLOO_INTERFACE, _LOOPBACK)
    backend = BACKENDS[device]
    try:
        _dist.init_process_group(
            backend, store=_store(place), rank=place.rank, world_size=place.size, timeout=_IDLE_TIMEOUT
        )
        host_group = None if backend == "gloo" else _dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        message = (
            f"the {place.size} ranks of this worker cannot be connected at {place.address}:{place.port}: {reason}"
        )
        raise ModelError(message) from error
    return RankGroup(place.rank, place.size, host_group)


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
        raise RankLost(f"the other ranks cannot be reached: {str(error).splitlines()[0]}") from error
