"""The worker's process on devices whose kernels run on this CPU: `python -m tests.e2e.shim_worker ARGUMENTS`.

Everything else is as on GPUs, ranks that the process starts included.
"""

from __future__ import annotations

from functools import cache

import torch

from stepahead.kernels.cuda.host.opaque import OpaqueBackend
from stepahead.worker import __main__ as worker_process
from stepahead.worker.model import registry
from stepahead.worker.ranks import followers
from stepahead.worker.ranks.place import RankPlace


@cache
def open_shim(device: str, place: RankPlace | None = None) -> OpaqueBackend:
    """In place of `registry.open_gpu`."""
    assert device.startswith("cuda"), (device, place)
    return OpaqueBackend()


if __name__ == "__main__":
    torch.set_num_threads(1)
    registry.open_gpu = open_shim  # pyright: ignore[reportAttributeAccessIssue]
    followers.PROGRAM = "tests.e2e.shim_worker"
    worker_process.main()
