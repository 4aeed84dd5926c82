"""Parts of the GPU check: kernels against the host's results, and against the bytes they must move."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu_check_rig import Rig, Row

from stepahead.kernels.cuda import elementwise, sampling
from stepahead.kernels.cuda.cache import write_kv
from stepahead.kernels.cuda.host.backend import HostBackend
from stepahead.kernels.cuda.inputs import Cells, gather_rows
from tests.kernels.cuda.mirror import MirrorBackend
from tests.kernels.cuda.small_runs import RUNS, largest_difference

ALLOWED = 2e-2
"""Absolute, over values of about unit size stored as bfloat16; ids, counts and statuses must be equal."""


def compare(rig: Rig) -> list[Row]:
    """Runs every small run of the tests on both devices."""
    rows: list[Row] = []
    for name, run in RUNS.items():
        difference = largest_difference(run(MirrorBackend(rig.backend)), run(HostBackend()))
        rows.append({"run": name, "largest difference": difference, "ok": difference <= ALLOWED})
    return rows


def launch_all(rig: Rig) -> list[Row]:
    """Runs every small run once, for a checker that watches from outside."""
    for run in RUNS.values():
        run(MirrorBackend(rig.backend))
    return [{"runs": len(RUNS), "ok": True}]


def copy_gb_per_s(rig: Rig) -> float:
    """Returns what a large copy on the device moves, bytes read and written."""
    num_bytes = rig.pick(1 << 30, 1 << 16)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=rig.backend.device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / rig.microseconds(lambda: target.copy_(source)) / 1e3


def floors(rig: Rig) -> list[Row]:
    """Times each kernel of a step and says how near it comes to the copy's bandwidth. Llama 8B, 8192 tokens."""
    bandwidth = copy_gb_per_s(rig)
    rows: list[Row] = [{"kernel": "copy", "us": 0.0, "GB/s": round(bandwidth), "of copy": 1.0}]
    for name, num_bytes, body in (*_elementwise(rig), *_sampling(rig)):
        us = rig.microseconds(body)
        speed = num_bytes / us / 1e3
        rows.append(
            {"kernel": name, "us": round(us, 1), "GB/s": round(speed), "of copy": round(speed / bandwidth, 2)}
        )
    return rows


Timed = tuple[str, int, Callable[[], object]]


def _elementwise(rig: Rig) -> list[Timed]:
    backend, tokens = rig.backend, rig.pick(8192, 4)
    hidden, inner, heads, kv_heads, head_dim = (
        rig.pick(4096, 64), rig.pick(14336, 96), rig.pick(32, 4), rig.pick(8, 2), rig.pick(128, 16),
    )  # fmt: skip
    x, residual, weight = rig.normal(tokens, hidden), rig.normal(tokens, hidden), rig.normal(hidden)
    out, gate_up = torch.empty_like(x), rig.normal(tokens, 2 * inner)
    qkv = rig.normal(tokens, heads + 2 * kv_heads, head_dim)
    tables = (rig.normal(tokens, head_dim // 2, dtype=torch.float32),) * 2
    positions = rig.integers(range(tokens), torch.int64)
    cache = rig.normal(-(-tokens // 16), 2, kv_heads, 16, head_dim)
    table, row = rig.normal(tokens, hidden), 2 * hidden
    turned, stored = (heads + kv_heads) * head_dim * 2, kv_heads * head_dim * 2
    return [
        ("rms_norm", tokens * 2 * row, lambda: elementwise.rms_norm(backend, x, weight, 1e-5, out)),
        ("add_rms_norm", tokens * 4 * row, lambda: elementwise.add_rms_norm(backend, residual, x, weight, 1e-5)),
        ("silu_mul", tokens * 3 * inner * 2, lambda: elementwise.gated_activation(backend, gate_up)),
        (
            "rope",
            tokens * 2 * turned,
            lambda: elementwise.rope(backend, qkv[:, : heads + kv_heads], positions, tables),
        ),
        (
            "write_kv",
            tokens * 2 * stored * 2,
            lambda: write_kv(backend, cache, qkv[:, heads:], positions),
        ),
        ("gather_rows", tokens * 2 * row, lambda: gather_rows(backend, table, positions)),
    ]


def _sampling(rig: Rig) -> list[Timed]:
    backend, rows, vocab = rig.backend, rig.pick(256, 3), rig.pick(128256, 700)
    logits = rig.normal(rows, vocab, dtype=torch.float32)
    num_bytes, words = rows * vocab * 4, -(-vocab // 32)
    slots, status = rig.integers(range(rows)), torch.zeros(rows, dtype=torch.uint8, device=backend.device)
    positions = rig.integers(range(rows), torch.int64)
    cells = Cells(positions.clone(), positions.clone())

    def columns(temperature: float, top_p: float, top_k: int) -> sampling.SamplingColumns:
        full = torch.full((rows,), temperature, device=backend.device)
        return sampling.SamplingColumns(
            temperature=full, top_p=torch.full_like(full, top_p), top_k=torch.full_like(slots, top_k),
            min_p=torch.zeros_like(full), seed=positions, choice_index=positions, output_index=positions,
        )  # fmt: skip

    counts = sampling.TokenCounts(
        torch.zeros(rows, vocab, dtype=torch.int32, device=backend.device),
        torch.zeros(rows, words, dtype=torch.int32, device=backend.device),
    )
    one = torch.ones(rows, device=backend.device)
    penalties = sampling.PenaltyColumns(repetition=one, frequency=one, presence=one)
    masks = sampling.Masks(
        words=torch.full((rows, words), -1, dtype=torch.int32, device=backend.device),
        index=slots, suppressed_ids=rig.integers([]), suppressed_start=rig.integers([0] * (rows + 1)),
    )  # fmt: skip
    wanted = torch.full_like(slots, 20)
    places = (status, slots, positions)
    greedy, drawn, filtered = columns(0.0, 1.0, 0), columns(1.0, 1.0, 0), columns(1.0, 0.9, 50)
    return [
        ("sample, greedy", num_bytes, lambda: sampling.sample(backend, logits, places, greedy, cells)),
        ("sample, drawn", num_bytes, lambda: sampling.sample(backend, logits, places, drawn, cells)),
        ("sample, top-k, top-p", num_bytes, lambda: sampling.sample(backend, logits, places, filtered, cells)),
        ("logprobs, 20 best", num_bytes, lambda: sampling.logprobs(backend, logits, positions, status, wanted)),
        ("mask_logits", num_bytes, lambda: sampling.mask_logits(backend, logits, masks, status)),
        (
            "apply_penalties",
            2 * num_bytes,
            lambda: sampling.apply_penalties(backend, logits, slots, counts, penalties),
        ),
    ]
