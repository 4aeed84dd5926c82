"""`stepahead bench frontend`: what many streams cost the scheduler, with readers that are slow or gone if asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict, Unpack

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.bench_drive import PlannedRequest, drive
from stepahead.cli.bench_load import LoadShape, make_request
from stepahead.cli.bench_processes import ResourceWatch, resident_bytes, yield_cores, yielding_session
from stepahead.cli.bench_server import step_figures, watched_steps, workers_of
from stepahead.cli.bench_stats import median_of
from stepahead.cli.local_services import passing_log_dir, require_extras
from stepahead.cli.options import CONTEXT_SETTINGS, Overlap
from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView

STEADY_SHARE = 0.8
"""Of the sequences a worker may hold: where those who leave are missing, a step is a full one all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The load: a shape, and how many of its readers misbehave."""

    name: str
    shape: LoadShape
    num_slow: int = 0
    pause_s: float = 0.0
    """A slow reader sleeps so long after every message."""
    num_leaving: int = 0
    """Streams that are cancelled on the way, at points spread over the answer."""

    def requests(self) -> list[PlannedRequest]:
        """The slow come first, then those who leave, then everybody else."""
        planned: list[PlannedRequest] = []
        for index in range(self.shape.num_requests):
            message = make_request(self.shape, index)
            leaver = index - self.num_slow
            if leaver < 0:
                planned.append(PlannedRequest(message=message, pause_s=self.pause_s))
            elif leaver < self.num_leaving:
                after = 1 + leaver * self.shape.output_tokens // self.num_leaving
                planned.append(PlannedRequest(message=message, leave_after=after))
            else:
                planned.append(PlannedRequest(message=message))
        return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndFigures:
    """One run of a crowd; CPU and memory are the scheduler's process and its children."""

    load: str
    client: str
    num_requests: int
    num_running: int
    """Sequences that the workers hold at once."""
    tokens_per_s: float
    messages_per_s: float
    boundary_to_plan_us_p50: float
    boundary_to_plan_us_p99: float
    idle_fraction: float
    """Of the device while work waits, over all steps: the arrival of everybody at once is part of it."""
    steady_idle_fraction: float
    """The same over decode steps of nearly all sequences that a worker holds."""
    cpu_us_per_token: float
    """Scheduler CPU time per output token that was delivered."""
    cpu_share: float
    """Cores the scheduler kept busy."""
    memory_fresh_mib: float
    """Before the first request of all."""
    memory_peak_mib: float
    memory_after_mib: float
    kib_per_request: float
    """Growth from fresh to the peak, over the requests."""


async def run_crowd(ready: StackReady, crowd: Crowd, num_running: int, fresh_bytes: int) -> FrontEndFigures:
    """Runs the load once.

    Args:
        ready: the stack.
        crowd: the load.
        num_running: sequences that all workers hold at once.
        fresh_bytes: the scheduler's memory before its first request.
    """
    shape = crowd.shape
    before = await workers_of(ready.address)
    async with ResourceWatch([ready.scheduler_pid]) as used:
        done = await drive(ready.address, crowd.requests(), multiplexed=shape.multiplexed)
    records = (await watched_steps(ready.address, before)).records
    width = STEADY_SHARE * min(num_running, shape.num_requests) / len(ready.workers)
    steady = step_figures([record for record in records if record.rows == record.tokens >= width])
    steps = step_figures(records)
    return FrontEndFigures(
        load=crowd.name,
        client="multiplex" if shape.multiplexed else "generate",
        num_requests=shape.num_requests,
        num_running=min(num_running, shape.num_requests),
        tokens_per_s=done.tokens_per_s,
        messages_per_s=done.num_messages / done.duration_s,
        boundary_to_plan_us_p50=steps.boundary_to_plan_us_p50,
        boundary_to_plan_us_p99=steps.boundary_to_plan_us_p99,
        idle_fraction=steps.idle_fraction,
        steady_idle_fraction=steady.idle_fraction,
        cpu_us_per_token=1e6 * used.used_cpu_s / max(1, done.num_tokens),
        cpu_share=used.used_cpu_s / done.duration_s,
        memory_fresh_mib=fresh_bytes / 2**20,
        memory_peak_mib=used.peak_bytes / 2**20,
        memory_after_mib=used.after_bytes / 2**20,
        kib_per_request=(used.peak_bytes - fresh_bytes) / 2**10 / shape.num_requests,
    )


async def measure(
    options: StackOptions, crowds: Sequence[Crowd], rounds: int, console: Console
) -> list[list[FrontEndFigures]]:
    """Runs every crowd `rounds` times in one stack, in turn: A B A B.

    Returns:
        Per crowd its runs, in order.
    """
    runs: list[list[FrontEndFigures]] = [[] for _ in crowds]
    num_running = (options.max_num_seqs or 0) * options.workers

    async def body(ready: StackReady) -> None:
        yield_cores()
        fresh_bytes = resident_bytes(ready.scheduler_pid)
        with yielding_session():
            for crowd in crowds:
                await drive(
                    ready.address, crowd.requests()[: options.max_num_seqs], multiplexed=crowd.shape.multiplexed
                )
            with console.status("measuring") as status:
                for number in range(rounds):
                    for crowd, of_crowd in zip(crowds, runs, strict=True):
                        status.update(f"run {number + 1} of {rounds}: {crowd.name}")
                        of_crowd.append(await run_crowd(ready, crowd, num_running, fresh_bytes))

    with passing_log_dir(verbose=False) as log_dir, ConsoleView(Console(stderr=True, quiet=True)) as view:
        await run_stack(Stack(options, view, log_dir=log_dir), body)
    return runs


class FrontEndArguments(TypedDict):
    """The command's options."""

    model: str
    workers: int
    requests: int
    running: int
    client: str
    prompt_tokens: int
    output_tokens: int
    slow_readers: int
    pause: float
    disconnects: int
    messages_per_second: int
    overlap: str
    rounds: int
    as_json: bool


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--model", default="toy:sleep?ms=5", metavar="toy:NAME", help="A sleep device costs no core.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, help="Worker processes.")
@click.option("--requests", "-n", type=click.IntRange(1), default=500, help="Streams at once.")
@click.option("--running", type=click.IntRange(1), default=512, help="Sequences all workers hold; others queue.")
@click.option("--client", type=click.Choice(["multiplex", "generate"]), default="generate")
@click.option("--prompt", "prompt_tokens", type=click.IntRange(1), default=32, help="Tokens per prompt.")
@click.option("--output", "output_tokens", type=click.IntRange(2), default=512, help="Tokens per answer.")
@click.option("--slow-readers", type=click.IntRange(0), default=0, help="Of the requests; in every second run.")
@click.option("--pause", type=click.FloatRange(0, min_open=True), default=1.0, help="A slow reader's, in seconds.")
@click.option("--disconnects", type=click.IntRange(0), default=0, help="Of the requests; in every second run.")
@click.option("--messages-per-second", type=click.IntRange(100), default=4000, help="The scheduler's budget.")
@click.option("--overlap", type=Overlap(), default="on", help="How many steps are planned ahead; on is 1.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Runs per load; medians are shown.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every run instead of a table.")
def frontend(**arguments: Unpack[FrontEndArguments]) -> None:
    """Measures the scheduler under many streams: CPU per token, memory per request, the step loop's latency."""
    require_extras("scheduler", "worker")
    crowds = crowds_of(arguments)
    per_worker = -(-arguments["running"] // arguments["workers"])
    options = StackOptions(
        model=arguments["model"],
        workers=arguments["workers"],
        overlap=arguments["overlap"],
        max_num_seqs=per_worker,
        max_num_batched_tokens=max(2048, per_worker),
        max_model_len=arguments["prompt_tokens"] + arguments["output_tokens"] + 1,
        scheduler_flags=("--messages-per-second", str(arguments["messages_per_second"])),
    )
    runs = asyncio.run(measure(options, crowds, arguments["rounds"], Console(stderr=True)))
    if arguments["as_json"]:
        click.echo(json.dumps({"runs": [asdict(run) for of_crowd in runs for run in of_crowd]}))
        return
    Console(highlight=False, width=150).print(_table([median_of(of_crowd) for of_crowd in runs]))


def crowds_of(arguments: FrontEndArguments) -> list[Crowd]:
    """The load, and beside it the same load with the readers that were asked for.

    Raises:
        click.UsageError: more misbehave than there are, or they would share a stream.
    """
    shape = LoadShape(
        num_requests=arguments["requests"],
        prompt_tokens=arguments["prompt_tokens"],
        output_tokens=arguments["output_tokens"],
        multiplexed=arguments["client"] == "multiplex",
        vocab_size=256,
    )
    num_slow, num_leaving = arguments["slow_readers"], arguments["disconnects"]
    if not num_slow and not num_leaving:
        return [Crowd(name="all read", shape=shape)]
    if shape.multiplexed:
        raise click.UsageError("--slow-readers and --disconnects need --client generate: a stream per request")
    if num_slow + num_leaving > shape.num_requests:
        raise click.UsageError("--slow-readers and --disconnects are more than --requests")
    disturbed = Crowd(
        name=f"{num_slow} slow, {num_leaving} leave",
        shape=shape,
        num_slow=num_slow,
        pause_s=arguments["pause"],
        num_leaving=num_leaving,
    )
    return [Crowd(name="all read", shape=shape), disturbed]


def _table(rows: Sequence[FrontEndFigures]) -> Table:
    table = Table(title="the scheduler under many streams (medians)")
    for name in ("load", "client", "requests", "running", "tok/s", "messages/s", "to plan us p50/p99",
                 "idle % all/steady", "us/token", "cores", "MiB fresh/peak/after", "KiB/request"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("load", "client") else "right")
    for row in rows:
        table.add_row(
            row.load,
            row.client,
            f"{row.num_requests:,.0f}",
            f"{row.num_running:,.0f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.messages_per_s:,.0f}",
            f"{row.boundary_to_plan_us_p50:.0f}/{row.boundary_to_plan_us_p99:.0f}",
            f"{100 * row.idle_fraction:.2f}/{100 * row.steady_idle_fraction:.2f}",
            f"{row.cpu_us_per_token:.1f}",
            f"{row.cpu_share:.2f}",
            f"{row.memory_fresh_mib:.0f}/{row.memory_peak_mib:.0f}/{row.memory_after_mib:.0f}",
            f"{row.kib_per_request:.1f}",
        )
    return table
