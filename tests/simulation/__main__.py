"""Runs the simulation over many seeds: `python -m tests.simulation --seeds 200 [--start 0]`.

A failure prints its seed; `python -m tests.simulation --start SEED --seeds 1` replays it exactly.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

from tests.simulation.world import World

FAULT_COUNTERS = (
    "abort", "crash", "ghost", "expired", "preemptions", "overrun_rows", "sit_outs", "skips", "holes", "nans",
    "failed_steps", "cached_blocks", "queue_full", "forks", "stop_texts", "chunks", "infeasible", "lost_sequences",
    "null_rows", "window_hits", "exact_replays", "approximate_replays", "mixed_replays",
    "gate_masks", "gate_skips", "waits_for_gates", "late_gates", "useless_gates", "overdue_gates", "withheld_masks",
    "gated_preemptions", "gated_losses", "forked_choices", "complete_texts", "dead_ends", "nothing_allowed",
    "failed_masks",
)  # fmt: skip
"""Every kind of trouble the world knows; over enough seeds each must have happened."""


def run_seeds(start: int, count: int) -> tuple[Counter[str], int | None]:
    """Runs seeds start .. start + count - 1; returns the summed counters and the first failing seed."""
    total: Counter[str] = Counter()
    for seed in range(start, start + count):
        world = World(seed)
        try:
            world.run()
        except Exception:
            traceback.print_exc()
            return total, seed
        total.update(world.counters)
    return total, None


def main() -> int:
    """Command line; the exit status is 1 if a seed fails or a kind of trouble never happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    arguments = parser.parse_args()
    total, failed = run_seeds(arguments.start, arguments.seeds)
    if failed is not None:
        print(f"seed {failed} FAILED; replay: python -m tests.simulation --start {failed} --seeds 1")
        return 1
    print(f"{arguments.seeds} seeds clean, {sum(total.values())} events")
    print("  ".join(f"{name}={count}" for name, count in sorted(total.items())))
    missing = [name for name in FAULT_COUNTERS if not total[name]]
    if missing and arguments.seeds >= 200:
        print(f"never happened: {', '.join(missing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
