"""Rank 1 of a pair that serves many models, told by a test what to load.

Each line on stdin is [spec, dtype]: it follows rank 0 through that model until rank 0 says Stop, then reads on. Or
it is ["allocate", fault]: its part of a common allocation fails.
"""

from __future__ import annotations

import json
import os
import sys

from stepahead.worker.errors import ModelError
from stepahead.worker.ranks.follower import follow, load_shard
from stepahead.worker.ranks.place import place_from_environment
from stepahead.worker.ranks.rank_group import connect
from stepahead.worker.ranks.start_up import complete_together


def fail(fault: str) -> None:
    raise ModelError(fault)


def main() -> None:
    place = place_from_environment(2, os.environ)
    assert place is not None
    group = connect(place, "cpu")
    for line in sys.stdin:
        spec, dtype = json.loads(line)
        try:
            if spec == "allocate":
                complete_together(group, lambda fault=dtype: fail(fault))
            shard = load_shard(spec, dtype, 1, place.local_size, group)
        except ModelError:
            continue  # rank 0 has been told
        follow(group, shard)


if __name__ == "__main__":
    main()
