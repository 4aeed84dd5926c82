"""Prints gate 2's tables: `python -m tests.kernels.cuda` (gate 1's: `python -m stepahead.kernels.cuda.gates`).

How far each kernel is from its reference, and what notices when one of its barriers is left out.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import torch

from stepahead.kernels.cuda import elementwise
from stepahead.kernels.cuda.host.backend import HostBackend
from stepahead.kernels.reference import elementwise as reference
from stepahead.kernels.reference.rope import RopeConfig, apply_rope, rope_tables
from tests.kernels.cuda.paged import TOLERANCE, Heads, Paged, options_for
from tests.kernels.cuda.small_runs import RUNS
from tests.kernels.cuda.test_elementwise import ROUNDING, normal
from tests.kernels.cuda.test_sampling import random_logits, reference_tokens, run_sample
from tests.kernels.cuda.test_synchronization import all_sites, checked, notices

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPTIONS = ({}, {"window": 1}, {"window": 33}, {"soft_cap": 2.0}, {"window": 70, "soft_cap": 1.5})
HEADS = (
    Heads(num_heads=6, num_kv_heads=2, head_dim=64),
    Heads(num_heads=9, num_kv_heads=1, head_dim=80),
    Heads(num_heads=4, num_kv_heads=4, head_dim=128, block_size=32),
)


def write(line=""):
    sys.stdout.write(f"{line}\n")


def attention_errors():
    write("| attention | storage | cases | largest error | allowed |")
    write("|---|---|---|---|---|")
    for kind, lengths, counts in (
        ("decode", [1, 15, 16, 17, 64, 65, 129, 600], None),
        ("chunk", [1, 70, 17, 130], [1, 70, 3, 45]),
    ):
        for dtype in DTYPES[1:] if kind == "chunk" else DTYPES:
            errors = []
            for heads in HEADS:
                paged = Paged.make(dtype, heads, lengths, counts)
                for changes in OPTIONS:
                    options = options_for(heads, **changes)
                    errors.append(paged.error(getattr(paged, kind)(HostBackend(), options), options))
            name = str(dtype).removeprefix("torch.")
            write(f"| {kind} | {name} | {len(errors)} | {max(errors):.1e} | {TOLERANCE[dtype]:.1e} |")


def elementwise_errors():
    """Of values of about unit size, against float64; relative to |value| + 0.01."""
    write("| operation | storage | values | largest relative error | allowed |")
    write("|---|---|---|---|---|")
    backend = HostBackend()
    cos, sin = rope_tables(RopeConfig(head_dim=128, theta=10_000.0), 64)
    tables, positions = (torch.from_numpy(cos), torch.from_numpy(sin)), torch.arange(64)
    for dtype in DTYPES:
        x, weight, gate_up = normal(64, 512, dtype=dtype), normal(512, dtype=dtype), normal(64, 1024, dtype=dtype)
        normed, wide = torch.empty_like(x), torch.empty_like(x)
        elementwise.rms_norm(backend, x, weight, 1e-5, normed)
        elementwise.rms_norm(backend, x, weight.float(), 1e-5, wide)
        turned = x.clone().view(64, 4, 128)
        elementwise.rope(backend, turned, positions, tables)
        numbers, gates = x.float().numpy(), gate_up.float().numpy()
        wanted = reference.rms_norm(numbers, weight.float().numpy(), 1e-5)
        for name, found, expected in (
            ("rms_norm", normed, wanted),
            ("rms_norm, float32 weight", wide, wanted),
            ("rope", turned, apply_rope(numbers.reshape(64, 4, 128), positions.numpy(), cos, sin)),
            ("silu_mul", elementwise.gated_activation(backend, gate_up), reference.silu_mul(gates)),
            (
                "gelu_tanh_mul",
                elementwise.gated_activation(backend, gate_up, "gelu_tanh"),
                reference.gelu_tanh_mul(gates),
            ),
        ):
            exact = torch.from_numpy(expected).double()
            error = float(((found.double() - exact).abs() / (exact.abs() + 1e-2)).max())
            storage = str(dtype).removeprefix("torch.")
            write(f"| {name} | {storage} | {found.numel()} | {error:.1e} | {ROUNDING[dtype]:.1e} |")


def sampled_tokens():
    random, rows = np.random.default_rng(11), 2000
    columns = {
        "temperature": random.choice([0.0, 0.5, 1.0, 1.7], rows),
        "top_p": random.choice([1.0, 0.95, 0.5], rows),
        "top_k": random.choice([0, 1, 20], rows),
        "min_p": random.choice([0.0, 0.05], rows),
        "seed": random.integers(0, 2**63, rows),
        "choice_index": random.integers(0, 2**40, rows),
        "output_index": random.integers(0, 2**40, rows),
    }
    logits = random_logits(rows, 2000, seed=12)
    tokens, _, _ = run_sample(logits, **columns)
    equal = int((tokens == np.array(reference_tokens(logits, **columns))).sum())
    write(f"Sampling, {rows} rows of 2000 logits with mixed parameters: {equal} tokens equal the reference's.")


def barriers():
    found = defaultdict(list)
    for site, name in all_sites():
        found[site].append(notices(name, site))
    write("| barriers in | number | noticed when left out | by a fault | by a result |")
    write("|---|---|---|---|---|")
    for file in sorted({site.file for site in found}):
        best = [next((how for how in hows if how), None) for site, hows in found.items() if site.file == file]
        by_result = best.count("result")
        noticed = len(best) - best.count(None)
        write(f"| {file} | {len(best)} | {noticed} | {noticed - by_result} | {by_result} |")


def main():
    attention_errors()
    write()
    elementwise_errors()
    write()
    sampled_tokens()
    write()
    barriers()
    write()
    for name in RUNS:
        checked(name)
    write(f"{len(RUNS)} runs over every kernel, every access checked: no race, nothing out of bounds.")


if __name__ == "__main__":
    main()
