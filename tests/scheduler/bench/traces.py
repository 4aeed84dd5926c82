"""Small traces in the two formats."""

from __future__ import annotations

import json
import random
from pathlib import Path

from stepahead.scheduler.bench.replay import ReplayOptions
from stepahead.scheduler.bench.simulated_lane import DeviceSpeed
from stepahead.scheduler.core import LaneConfig, SchedulerConfig

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0319601,110,27
"""


def write_azure(path: Path, text: str = AZURE) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_mooncake(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def conversations(num_requests: int, seed: int = 1) -> list[dict[str, object]]:
    """Requests of which each shares some whole blocks with one before it, in the manner of Mooncake's."""
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    chains: list[list[int]] = [[]]
    next_hash = 0
    for index in range(num_requests):
        parent = rng.choice(chains)
        chain = parent[: rng.randint(0, len(parent))]
        num_new = rng.randint(1, 3)
        chain = [*chain, *range(next_hash, next_hash + num_new)]
        next_hash += num_new
        # The last block of a prompt is not full, so nobody builds on it.
        chains.append(chain[:-1])
        rows.append(
            {
                "timestamp": 15 * index,
                "input_length": 512 * (len(chain) - 1) + rng.randint(1, 511),
                "output_length": rng.randint(64, 2500),
                "hash_ids": chain,
            }
        )
    return rows


def options(**changes: object) -> ReplayOptions:
    """A small lane with room for everything, unless changed."""
    lane = {
        "num_slots": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 4096,
        "num_blocks": 2048,
        "block_size": 4,
    }
    lane.update((name, changes.pop(name)) for name in list(lane) if name in changes)
    values: dict[str, object] = {
        "lane": LaneConfig(**lane),
        "num_lanes": 1,
        "speed": DeviceSpeed(step_ns=1_000_000, token_ns=10_000),
        "scheduler": SchedulerConfig(overlap_depth=1),
        "num_tenants": 4,
        "check_every": 7,
    }
    return ReplayOptions(**(values | changes))  # type: ignore[arg-type]
