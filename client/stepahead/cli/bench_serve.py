"""`stepahead bench serve`: requests come when they come, by a Poisson process or as a trace recorded them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

import click

from stepahead.cli.bench_options import BenchArguments, ShapeType, bench_options, measure_and_report, subject_of
from stepahead.cli.bench_workload import PromptSource, Shape, WorkItem, Workload, poisson_arrivals
from stepahead.cli.local_services import require_extras
from stepahead.cli.options import CONTEXT_SETTINGS


class TracedRequest(TypedDict):
    """One line of `python -m stepahead.scheduler.bench requests`."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: list[int]
    block_tokens: int


class ServeArguments(BenchArguments):
    """The command's options."""

    rates: tuple[float, ...]
    shape: Shape
    trace: Path | None
    requests: int
    speed: float
    scale: float
    max_num_seqs: int


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--rate", "rates", multiple=True, type=click.FloatRange(0, min_open=True),
              help="Requests per second, on average. Repeatable; without --trace the default is 1.")  # fmt: skip
@click.option("--shape", type=ShapeType(), default="S1", help="Tokens per prompt and answer, for --rate.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Instead of --rate: a recorded trace, Azure's .csv or Mooncake's .jsonl.")  # fmt: skip
@click.option("--requests", "-n", type=click.IntRange(1), default=64, help="So many, or a trace's first so many.")
@click.option("--speed", type=click.FloatRange(1e-3, 1e6), default=1.0, help="A trace's requests come faster.")
@click.option("--scale", type=click.FloatRange(0.004, 4), default=1.0, help="A trace's lengths are multiplied.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=64, help="Sequences a worker holds at once.")
@bench_options
def serve(**arguments: Unpack[ServeArguments]) -> None:
    """Measures an open loop: requests are sent at their times, however busy the server is.

    Latencies count from when a request was due. Every run has prompts and, with --rate, times of its own; a
    warm-up sends short ones first.
    """
    trace, shape, rates = arguments["trace"], arguments["shape"], arguments["rates"]
    if trace is not None and rates:
        raise click.UsageError("give either --rate or --trace")
    seed, num_requests = arguments["seed"], arguments["requests"]
    traced: list[TracedRequest] = []
    longest = shape.prompt_tokens + shape.output_tokens
    if trace is not None:
        traced = read_requests(trace, limit=num_requests, speed=arguments["speed"], scale=arguments["scale"])
        longest = max(each["prompt_tokens"] + each["output_tokens"] for each in traced)
    subject = subject_of(arguments, max_num_seqs=arguments["max_num_seqs"], max_model_len=longest + 1)

    def cells_of(vocab_size: int) -> Sequence[Callable[[int], Workload]]:
        if trace is not None:
            return [partial(traced_arrivals, trace.stem, traced, vocab_size, seed)]
        return [partial(_poisson, shape, num_requests, rate, vocab_size, seed) for rate in rates or (1.0,)]

    measure_and_report(subject, cells_of, arguments)


def read_requests(trace: Path, *, limit: int, speed: float, scale: float) -> list[TracedRequest]:
    """A trace's requests. The scheduler's package reads the formats, in a process of its own.

    Raises:
        click.ClickException: the file is no such trace.
    """
    require_extras("scheduler")
    flags = ("--limit", str(limit), "--speed", str(speed), "--scale", str(scale))
    command = (sys.executable, "-m", "stepahead.scheduler.bench", "requests", str(trace), *flags)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(done.stderr.strip().removeprefix("Error: "))
    return [json.loads(line) for line in done.stdout.splitlines()]


def _poisson(shape: Shape, num_requests: int, rate: float, vocab_size: int, seed: int, number: int) -> Workload:
    return poisson_arrivals(shape, num_requests, rate, vocab_size, f"{seed}-{number}")


def traced_arrivals(
    name: str, traced: Sequence[TracedRequest], vocab_size: int, seed: int, number: int
) -> Workload:
    """The trace with prompts of round `number`: equal blocks have equal tokens, but not those of other rounds."""
    items: list[WorkItem] = []
    for index, each in enumerate(traced):
        prompt: list[int] = []
        # Without blocks nothing is known to be shared: the request's own number stands for all of them.
        num_blocks = -(-each["prompt_tokens"] // each["block_tokens"])
        for place, block in enumerate(each["blocks"] or [index] * num_blocks):
            key = f"{seed}-{number}-{block}" if each["blocks"] else f"{seed}-{number}-own-{block}-{place}"
            prompt += PromptSource(vocab_size, key).prompt(each["block_tokens"])
        items.append(WorkItem(each["at_s"], tuple(prompt[: each["prompt_tokens"]]), each["output_tokens"]))
    return Workload(name, tuple(items))
