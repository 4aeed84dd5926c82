"""`stepahead bench overlap`: what zero-overhead scheduling hides, overlap on against off, side by side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.bench_load import LoadResult, LoadShape, run_load
from stepahead.cli.bench_processes import yield_cores
from stepahead.cli.bench_server import step_figures
from stepahead.cli.bench_stats import median_of
from stepahead.cli.local_services import passing_log_dir, require_extras
from stepahead.cli.options import CONTEXT_SETTINGS
from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView

OVERLAPS = ("off", "on")
"""Both stacks stand at the same time; loads alternate between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFigures:
    """One run. Idle and gaps count steps whose work was waiting."""

    model: str
    overlap: str
    client: str
    num_requests: int
    tokens_per_s: float
    idle_fraction: float
    gap_us_p50: float
    gap_us_p99: float
    boundary_to_plan_us_p99: float
    running_share: float
    step_ms_p50: float
    num_messages: int


def figures(model: str, overlap: str, shape: LoadShape, result: LoadResult) -> OverlapFigures:
    """The figures of one run.

    Idle counts steps with work waiting: gap before the forward plus idle between forward and sampling.
    Gap percentiles are over full decode steps (every request in the step, one token each): the steady state.
    """
    waited = [record for record in result.records if record.work_waited]
    steady = [r for r in waited if r.rows == r.tokens == shape.num_requests] or waited
    steps = step_figures(steady)
    return OverlapFigures(
        model=model,
        overlap=overlap,
        client="multiplex" if shape.multiplexed else "generate",
        num_requests=shape.num_requests,
        tokens_per_s=result.tokens_per_s,
        idle_fraction=steps.idle_fraction,
        gap_us_p50=steps.gap_us_p50,
        gap_us_p99=steps.gap_us_p99,
        boundary_to_plan_us_p99=steps.boundary_to_plan_us_p99,
        running_share=result.running_share,
        step_ms_p50=steps.step_ms_p50,
        num_messages=result.num_messages,
    )


async def measure_model(
    options: StackOptions, shapes: Sequence[LoadShape], rounds: int
) -> tuple[list[OverlapFigures], int]:
    """Runs every shape `rounds` times on both stacks, in alternating order.

    Returns:
        Medians per shape and overlap, and how many requests got different tokens with overlap on and off.
    """
    cells: dict[tuple[int, str], list[OverlapFigures]] = {}
    num_different = 0

    async def with_both(off: StackReady, on: StackReady) -> None:
        nonlocal num_different
        # The client shares the cores with the servers it measures; it must not take them from them.
        yield_cores()
        addresses = {"off": off.address, "on": on.address}
        for index, shape in enumerate(shapes):
            for address in addresses.values():
                await run_load(address, shape)  # warm-up
            for round_number in range(rounds):
                order = OVERLAPS if round_number % 2 == 0 else OVERLAPS[::-1]
                results = {overlap: await run_load(addresses[overlap], shape) for overlap in order}
                for overlap, result in results.items():
                    cells.setdefault((index, overlap), []).append(figures(options.model, overlap, shape, result))
                num_different += sum(
                    results["on"].tokens[key] != tokens for key, tokens in results["off"].tokens.items()
                )

    view_console = Console(stderr=True, quiet=True)
    with passing_log_dir(verbose=False) as log_dir, ConsoleView(view_console) as view:
        stacks = {
            overlap: Stack(replace(options, overlap=overlap), view, log_dir=_subfolder(log_dir, overlap))
            for overlap in OVERLAPS
        }

        async def start_second(off: StackReady) -> None:
            try:
                await with_both(off, await stacks["on"].start())
            finally:
                await stacks["on"].stop()

        await run_stack(stacks["off"], start_second)
    return [median_of(runs) for _, runs in sorted(cells.items())], num_different


def _subfolder(log_dir: Path | None, overlap: str) -> Path | None:
    if log_dir is None:
        return None
    folder = log_dir / f"overlap-{overlap}"
    folder.mkdir()
    return folder


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--model", "models", multiple=True, default=("toy:sleep?ms=2", "toy:sleep?ms=5", "toy:sleep?ms=10"),
    help="Repeatable. A sleep device shows what is hidden; a real model what is gained.",
)  # fmt: skip
@click.option("--requests", "-n", multiple=True, type=click.IntRange(1), default=(32, 256), help="Repeatable.")
@click.option("--client", "clients", type=click.Choice(["multiplex", "generate", "both"]), default="both")
@click.option("--prompt", "prompt_tokens", type=click.IntRange(1), default=128, help="Tokens per prompt.")
@click.option("--output", "output_tokens", type=click.IntRange(2), default=128, help="Tokens per answer.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Runs per cell; medians are shown.")
@click.option("--batched-tokens", type=click.IntRange(1), default=2048, help="Tokens one step may feed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def overlap(
    *,
    models: tuple[str, ...],
    requests: tuple[int, ...],
    clients: str,
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    batched_tokens: int,
    as_json: bool,
) -> None:
    """Compares overlap on with off: idle device, gaps, throughput, and that the tokens are the same."""
    require_extras("scheduler", "worker")
    kinds = {"multiplex": (True,), "generate": (False,), "both": (True, False)}[clients]
    shapes = [
        LoadShape(
            num_requests=num_requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            multiplexed=multiplexed,
            vocab_size=256,
        )
        for num_requests in requests
        for multiplexed in kinds
    ]
    cells: list[OverlapFigures] = []
    different: dict[str, int] = {}
    with Console(stderr=True).status("measuring") as status:
        for model in models:
            status.update(f"measuring {model}")
            options = StackOptions(
                model=model,
                max_num_seqs=max(requests),
                max_num_batched_tokens=max(batched_tokens, *requests),
                max_model_len=prompt_tokens + output_tokens + 1,
            )
            medians, different[model] = asyncio.run(measure_model(options, shapes, rounds))
            cells += medians
    if as_json:
        click.echo(json.dumps({"cells": [asdict(cell) for cell in cells], "different_tokens": different}))
        return
    Console(highlight=False, width=160).print(_table(cells))
    for model, count in different.items():
        click.echo(f"{model}: {count} answers differ between overlap on and off")


def _table(cells: Sequence[OverlapFigures]) -> Table:
    table = Table(title="device idle while work waits, over steady decode steps (medians)")
    for name in ("model", "requests", "client", "overlap", "tok/s", "step ms", "idle %", "gap us p50/p99",
                 "boundary to plan us p99", "running %", "messages"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("model", "client", "overlap") else "right")
    for cell in cells:
        table.add_row(
            cell.model,
            str(cell.num_requests),
            cell.client,
            cell.overlap,
            f"{cell.tokens_per_s:,.0f}",
            f"{cell.step_ms_p50:.2f}",
            f"{100 * cell.idle_fraction:.2f}",
            f"{cell.gap_us_p50:.0f}/{cell.gap_us_p99:.0f}",
            f"{cell.boundary_to_plan_us_p99:.0f}",
            f"{100 * cell.running_share:.1f}",
            f"{cell.num_messages:,.0f}",
        )
    return table
