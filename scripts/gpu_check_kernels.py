#!/usr/bin/env python3
"""Checks the CUDA kernels on a GPU: the small runs of the tests against the host back end, then a few timings.

    pip install -e '.[dev,cuda]' and a torch built for CUDA; then from the root: python scripts/gpu_check_kernels.py

Written before any GPU was at hand: only its comparison has been tried (tests/kernels/cuda/test_mirror.py). Exits
with the number of runs that differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stepahead.kernels.cuda.attention import AttentionOptions, paged_decode
from stepahead.kernels.cuda.cupy_backend import CupyBackend
from stepahead.kernels.cuda.errors import KernelUnavailable
from stepahead.kernels.cuda.host.backend import HostBackend
from tests.kernels.cuda.mirror import MirrorBackend
from tests.kernels.cuda.small_runs import RUNS, largest_difference

ALLOWED = 2e-2
"""Absolute, over values of about unit size stored as bfloat16; ids, counts and statuses must be equal."""


def compare(backend: CupyBackend) -> int:
    """Runs every small run on both devices; returns how many differ by more than ALLOWED."""
    num_different = 0
    for name, run in RUNS.items():
        difference = largest_difference(run(MirrorBackend(backend)), run(HostBackend()))
        num_different += not difference <= ALLOWED
        print(f"{'ok  ' if difference <= ALLOWED else 'DIFF'} {name:20} {difference:.2e}")
    return num_different


def time_decode(backend: CupyBackend, num_rows: int, context: int) -> None:
    """Prints the time and the bandwidth of one layer's decode: 32 heads over 8 of 128 values, bfloat16."""
    blocks = -(-context // 16)
    cache = torch.randn(num_rows * blocks, 2, 8, 16, 128, dtype=torch.bfloat16, device=backend.device)
    queries = torch.randn(num_rows, 32, 128, dtype=torch.bfloat16, device=backend.device)
    out = torch.empty_like(queries)
    ids = torch.randperm(num_rows * blocks, device=backend.device).to(torch.int32).view(num_rows, blocks)
    lens = torch.full((num_rows,), context, dtype=torch.int32, device=backend.device)
    rows = (torch.arange(num_rows, dtype=torch.int32, device=backend.device), lens, ids)
    options = AttentionOptions(scale=128**-0.5)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(25):
        if repeat == 5:
            begin.record()
        paged_decode(backend, out, queries, cache, rows, options, context)
    end.record()
    end.synchronize()
    ms = begin.elapsed_time(end) / 20
    num_bytes = num_rows * context * 2 * 8 * 128 * 2
    print(f"decode, {num_rows} rows of {context}: {ms * 1e3:.0f} us, {num_bytes / ms / 1e6:.0f} GB/s")


def main() -> int:
    """Compares, then times; returns how many runs differ."""
    try:
        backend = CupyBackend()
    except KernelUnavailable as error:
        sys.exit(str(error))
    num_different = compare(backend)
    for num_rows, context in ((1, 8192), (32, 1024), (256, 1024)):
        time_decode(backend, num_rows, context)
    return num_different


if __name__ == "__main__":
    sys.exit(main())
