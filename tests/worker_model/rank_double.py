"""Rank 1 of a pair that serves many models, told by a test what to load.

Each line on stdin is [what, ...]. "host", spec, dtype loads a shard on the CPU; "device", spec, dtype, options one
on a device whose kernels run on this CPU. It follows rank 0 through that model until rank 0 says Stop, then reads
on. "allocate", fault: its part of a common allocation fails.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from stepahead.kernels.cuda.host.opaque import OpaqueBackend
from stepahead.worker.errors import ModelError
from stepahead.worker.model.cuda_engine import CudaOptions
from stepahead.worker.ranks.cuda_shard import load_cuda_shard
from stepahead.worker.ranks.follower import follow
from stepahead.worker.ranks.host_shard import load_host_shard
from stepahead.worker.ranks.place import place_from_environment
from stepahead.worker.ranks.rank_group import connect
from stepahead.worker.ranks.start_up import complete_together


def fail(fault: str) -> None:
    raise ModelError(fault)


def main() -> None:
    place = place_from_environment(2, os.environ)
    assert place is not None
    torch.set_num_threads(1)
    group = connect(place, torch.device("cpu"))
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            match what, arguments:
                case "host", [spec, dtype]:
                    follow(group, load_host_shard(spec, dtype, 1, place, group))
                case "device", [spec, dtype, options]:
                    backend, chosen = OpaqueBackend(), CudaOptions(forbid_waits=True, **options)
                    group._ordered_sums = chosen.deterministic
                    follow(group, load_cuda_shard(spec, dtype, backend, chosen, place, group))
                case _:
                    complete_together(group, lambda faults=arguments: fail(*faults))
        except ModelError:
            continue  # rank 0 has been told


if __name__ == "__main__":
    main()
