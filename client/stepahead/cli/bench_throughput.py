"""`stepahead bench throughput`: closed batches, every request there from the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

import click

from stepahead.cli.bench_options import BenchArguments, ShapeType, bench_options, measure_and_report, subject_of
from stepahead.cli.bench_workload import Shape, Workload, closed_batch
from stepahead.cli.options import CONTEXT_SETTINGS


class ThroughputArguments(BenchArguments):
    """The command's options."""

    shapes: tuple[Shape, ...]
    requests: tuple[int, ...]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--shape", "shapes", multiple=True, type=ShapeType(), default=("S1", "S2"),
    help="Tokens per prompt and answer; S1 is 128/128, S2 512/64. Repeatable.",
)  # fmt: skip
@click.option("--requests", "-n", multiple=True, type=click.IntRange(1), default=(1, 8, 32), help="Repeatable.")
@bench_options
def throughput(**arguments: Unpack[ThroughputArguments]) -> None:
    """Measures closed batches: all requests at once, greedy, from random token ids.

    With --vs a peer runs the same workloads in between, A B A B, and the ratios are shown. See scripts/peers.
    """
    shapes, batches, seed = arguments["shapes"], arguments["requests"], arguments["seed"]
    tokens = max(shape.prompt_tokens + shape.output_tokens for shape in shapes)
    subject = subject_of(arguments, max_num_seqs=max(batches), max_model_len=tokens + 1)

    def cells_of(vocab_size: int) -> Sequence[Callable[[int], Workload]]:
        return [partial(_cell, shape, batch, vocab_size, seed) for shape in shapes for batch in batches]

    measure_and_report(subject, cells_of, arguments)


def _cell(shape: Shape, num_requests: int, vocab_size: int, seed: int, number: int) -> Workload:
    return closed_batch(shape, num_requests, vocab_size, f"{seed}-{number}")
