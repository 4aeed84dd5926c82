"""What the decoder asks of the other ranks: the `Communicator` seam.

Every rank runs the same lines in the same order. On the CPU a call returns when all ranks have made it. On a GPU it
is work on the current stream: it returns at once, and the device waits for the other ranks' devices.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """The ranks of a model, seen from one of them."""

    @property
    def rank(self) -> int:
        """0 is the rank that samples."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of every rank's `x`, the same bits on every rank; `x` is overwritten.

        Raises:
            RankLost: another rank is gone.
        """
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's `x` on every rank; the others' `x`, of its shape and dtype, is overwritten.

        Raises:
            RankLost: another rank is gone.
        """
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's `x` in the order of ranks, all of one shape, on rank 0; nothing elsewhere.

        Raises:
            RankLost: another rank is gone.
        """
        ...


class Alone:
    """The one rank of a model that is not sharded: nothing to say to anybody."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.broadcast`."""
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See `Communicator.gather`."""
        return [x]


ALONE = Alone()
