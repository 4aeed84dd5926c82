"""A decoder step of the CPU library against what this machine can do at most, and where its time goes.

    .venv/bin/python scripts/bench_step.py MODEL [--rows 1,8,32] [--prefill 512] [--context 192] [--rounds 15]

MODEL is a folder or file as `stepahead up` takes it. The roof of a step is the larger of (weights + KV read) over
the rate at which all threads read the packed weights, and its floating point operations over the rate at which they
multiply registers; both rates are measured between the rounds. Nothing else runs: no scheduler, no sampling.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from stepahead.kernels.cpu.step.decoder_step import DecoderStep
from stepahead.kernels.cpu.step.library import InstructionSet, Phase, Probe, instruction_sets
from stepahead.kernels.ops import StepLayout
from stepahead.worker.model.checkpoint import open_checkpoint
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.cpu_runner import DTYPES
from stepahead.worker.model.native_engine import NativeEngine

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """Rows that feed `num_tokens` each after `context` tokens; every row's last token gives logits."""

    num_rows: int
    num_tokens: int
    context: int

    @property
    def name(self) -> str:
        """What the tables call it."""
        return f"prefill {self.num_tokens}" if self.num_tokens > 1 else f"decode {self.num_rows}"

    def layout(self, rng: np.random.Generator, num_blocks: int) -> StepLayout:
        """Each row's blocks lie anywhere in the cache."""
        length = self.context + self.num_tokens
        width = -(-length // BLOCK_SIZE)
        tables = rng.permutation(num_blocks)[: self.num_rows * width].reshape(self.num_rows, width)
        positions = np.tile(np.arange(self.context, length), self.num_rows)
        rows = np.repeat(np.arange(self.num_rows), self.num_tokens)
        return StepLayout(
            positions=positions,
            slot_mapping=tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start_loc=np.arange(self.num_rows + 1, dtype=np.int32) * self.num_tokens,
            seq_lens=np.full(self.num_rows, length, np.int32),
            block_tables=tables.astype(np.int32),
        )

    def flops(self, config: ModelConfig) -> float:
        """Of the matrix products, attention's included; the last layer ends with the tokens that give logits."""
        heads = config.num_heads * config.head_dim
        inputs = config.hidden_size * (heads + 2 * config.num_kv_heads * config.head_dim)
        rest = config.hidden_size * (heads + 3 * config.intermediate_size)
        tokens, layers = self.num_rows * self.num_tokens, config.num_layers
        linears = tokens * (inputs * layers + rest * (layers - 1))
        linears += self.num_rows * (rest + config.hidden_size * config.vocab_size)
        seen = self.context + (self.num_tokens + 1) / 2
        attention = 2 * heads * seen * (tokens * (layers - 1) + self.num_rows)
        return 2.0 * (linears + attention)


def fill_cache(step: DecoderStep, rng: np.random.Generator) -> None:
    """Small values everywhere: zeros would be one page of the system's, and fast."""
    values = torch.tensor(rng.normal(size=1 << 16))
    for part in step.cache_memory():
        narrow = part.dtype == np.uint16
        few = values.bfloat16().view(torch.uint16).numpy() if narrow else values.float().numpy()
        part[:] = np.resize(few, part.shape)


def rate(step: DecoderStep, kind: Probe, amount: int) -> float:
    """Bytes or floating point operations per second."""
    start = time.perf_counter()
    done = step.probe(kind, amount)
    return done / (time.perf_counter() - start)


def measure(engine: NativeEngine, config: ModelConfig, loads: list[Load], rounds: int, console: Console) -> None:
    """Runs the loads in turn, the probes between them, and prints two tables."""
    step, rng = engine.step, np.random.default_rng(1)
    num_blocks = step.cache_memory()[0].shape[1]
    fill_cache(step, rng)
    cycles = step.profile()
    logits = np.zeros((max(load.num_rows for load in loads), config.vocab_size), np.float32)
    seconds: dict[Load, list[float]] = {load: [] for load in loads}
    spent: dict[Load, list[np.ndarray]] = {load: [] for load in loads}
    reads: list[float] = []
    multiplies: list[float] = []
    for _ in range(rounds):
        reads.append(rate(step, Probe.READ, 2))
        multiplies.append(rate(step, Probe.MULTIPLY, 1_000_000))
        for load in loads:
            layout = load.layout(rng, num_blocks)
            tokens = rng.integers(0, config.vocab_size, len(layout.positions))
            last = layout.query_start_loc[1:].astype(np.int64) - 1
            memory = logits[: load.num_rows]
            step.forward(tokens, layout, last, logits=memory)
            cycles[:] = 0
            start = time.perf_counter()
            step.forward(tokens, layout, last, logits=memory)
            seconds[load].append(time.perf_counter() - start)
            spent[load].append(cycles.mean(axis=0))
    read, multiply = statistics.median(reads), statistics.median(multiplies)
    console.print(f"read {read / 1e9:.1f} GB/s, multiply {multiply / 1e9:.0f} GFLOP/s, {engine.name}")
    table = Table("step", "ms median", "least", "GFLOP", "MB", "roof ms", "of the roof %", "bound by")
    profile = Table("ms", *(phase.name.lower() for phase in Phase))
    for load in loads:
        flops = load.flops(config)
        moved = engine.stored_bytes + load.num_rows * load.context * engine.kv_bytes_per_token
        roof = max(flops / multiply, moved / read)
        median = statistics.median(seconds[load])
        table.add_row(
            load.name,
            f"{median * 1e3:.2f}",
            f"{min(seconds[load]) * 1e3:.2f}",
            f"{flops / 1e9:.2f}",
            f"{moved / 1e6:.0f}",
            f"{roof * 1e3:.2f}",
            f"{100 * roof / median:.0f}",
            "flops" if flops / multiply > moved / read else "bytes",
        )
        parts = np.median(np.array(spent[load]), axis=0)
        profile.add_row(load.name, *(f"{part / parts.sum() * median * 1e3:.2f}" for part in parts))
    console.print(table)
    console.print(profile)


def main() -> None:
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--prefill", default="512")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument(
        "--isa", default=instruction_sets()[0].name, choices=[isa.name for isa in instruction_sets()]
    )
    options = parser.parse_args()
    decodes = [Load(int(rows), 1, options.context) for rows in options.rows.split(",") if rows]
    prefills = [Load(1, int(tokens), 0) for tokens in options.prefill.split(",") if tokens]
    loads = decodes + prefills
    with closing(open_checkpoint(options.model)) as checkpoint:
        config = checkpoint.config
        engine = NativeEngine(
            config,
            checkpoint.weights,
            DTYPES[options.dtype],
            InstructionSet[options.isa],
            options.threads,
            lambda _done, _total: None,
        )
    longest = max(load.context + load.num_tokens for load in loads)
    blocks = max(load.num_rows * -(-(load.context + load.num_tokens) // BLOCK_SIZE) for load in loads)
    engine.step.allocate(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_tokens=max(load.num_rows * load.num_tokens for load in loads),
        max_positions=longest,
    )
    measure(engine, config, loads, options.rounds, Console(width=140))


if __name__ == "__main__":
    main()
