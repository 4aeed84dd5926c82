"""`python -m stepahead.kernels.cpu.step.speed`: what this machine gives a CPU step at most, measured when asked.

For every line on standard input it measures once and writes one JSON line, {"read_bytes_per_s": .., "flops_per_s":
..}. Threads, vector instructions and layout in memory are the step library's own. It runs beside what is measured,
in the same run: a shared host gives more in one minute than in the next.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch

from stepahead.kernels.cpu.step.decoder_step import DecoderStep
from stepahead.kernels.cpu.step.library import Probe, TensorKind, instruction_sets
from stepahead.kernels.cpu.step.step_shape import StepShape, tensor_shape
from stepahead.kernels.reference.rope import RopeConfig

_HIDDEN = 512
_NUM_READS = 3
_NUM_MULTIPLICATIONS = 2_000_000
"""Some tenths of a second on a core of 2 to 4 GHz."""


def probe_step(weight_bytes: int, num_threads: int) -> DecoderStep:
    """Returns a step with about `weight_bytes` of weights, nearly all in one matrix, every byte written once."""
    shape = StepShape(
        num_layers=1,
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=max(32, weight_bytes // 2 // _HIDDEN),
        norm_eps=1e-5,
        attention_scale=1.0,
        rope=RopeConfig(head_dim=64, theta=1e4),
        tied_head=True,
    )
    step = DecoderStep(shape, torch.bfloat16, instruction_sets()[0], num_threads, coded_weights=False)
    linears = ("QUERY", "KEY", "VALUE", "OUTPUT", "GATE", "UP", "DOWN", "HEAD")
    for kind in (TensorKind[name] for name in linears):
        step.set_tensor(kind, 0, torch.full(tensor_shape(shape, kind, 0), 0.5, dtype=torch.bfloat16))
    return step


def measure(step: DecoderStep) -> dict[str, float]:
    """Returns bytes and operations per second; see the module."""
    return {
        "read_bytes_per_s": _rate(step, Probe.READ, _NUM_READS),
        "flops_per_s": _rate(step, Probe.MULTIPLY, _NUM_MULTIPLICATIONS),
    }


def _rate(step: DecoderStep, kind: Probe, amount: int) -> float:
    start = time.perf_counter()
    done = step.probe(kind, amount)
    return done / (time.perf_counter() - start)


def main() -> None:
    """Measures once per line, until standard input ends."""
    parser = argparse.ArgumentParser(description="Measures read and multiply rates, once per line on stdin.")
    parser.add_argument("--weight-bytes", type=int, default=2**28)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    step = probe_step(arguments.weight_bytes, arguments.threads)
    for _ in sys.stdin:
        sys.stdout.write(json.dumps(measure(step)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
