"""What the commands `bench throughput` and `bench serve` share: options, and the way from a session to a report."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click
from rich.console import Console
from typing_extensions import override

from stepahead.cli.bench_report import report
from stepahead.cli.bench_session import Findings, Subject, run_session
from stepahead.cli.bench_workload import Shape, Workload, parse_shape
from stepahead.cli.options import ServerAddress
from stepahead.cli.stack import StackOptions

_Callback = TypeVar("_Callback", bound=Callable[..., object])


class ShapeType(click.ParamType[Shape]):
    """S1, S2 or PROMPT/OUTPUT."""

    name = "S1|S2|PROMPT/OUTPUT"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Shape:
        """Parses the option's text."""
        if isinstance(value, Shape):
            return value
        try:
            return parse_shape(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PeerCommand(click.ParamType[str]):
    """A command line, quoted as in a shell; the text is passed on."""

    name = "COMMAND"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the option's text."""
        text = str(value)
        try:
            parts = shlex.split(text)
        except ValueError as error:
            self.fail(f"{text!r}: {error}", param, ctx)
        if not parts:
            self.fail(f"{text!r} names no command", param, ctx)
        return text


class BenchArguments(TypedDict):
    """What is measured."""

    model: str | None
    server: str | None
    client: str
    vs: tuple[str, ...]
    roof: bool
    overlap: str | None
    dtype: str | None
    threads: int | None
    workers: int
    batched_tokens: int
    rounds: int
    seed: int
    plot: Path | None
    as_json: bool


def bench_options(command: _Callback) -> _Callback:
    """Adds them to a command."""
    options: list[Callable[[Any], Any]] = [
        click.option("--model", metavar="DIR|FILE.gguf|HUB_ID|toy:NAME", help="Starts a stack that serves it."),
        click.option("--server", type=ServerAddress(), help="Instead of --model: a scheduler that runs already."),
        click.option("--client", type=click.Choice(["multiplex", "generate"]), default="multiplex"),
        click.option(
            "--vs", multiple=True, type=PeerCommand(),
            help="A peer's script with its interpreter and arguments, run in turn with ours. Repeatable.",
        ),
        click.option("--rounds", type=click.IntRange(1), default=3, help="Runs per cell; medians are shown."),
        click.option("--seed", type=int, default=0, help="Of prompts and arrival times."),
        click.option("--roof/--no-roof", default=True, help="Measure what the CPU gives beside every run."),
        click.option("--overlap", metavar="on|off|DEPTH", help="As for `stepahead up`, like the next three."),
        click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"])),
        click.option("--threads", type=int, help="Threads per worker."),
        click.option("--workers", type=click.IntRange(1, 64), default=1, help="Worker processes."),
        click.option("--batched-tokens", type=click.IntRange(1), default=2048, help="Tokens one step may feed."),
        click.option(
            "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write tokens per second as an SVG."
        ),
        click.option("--json", "as_json", is_flag=True, help="One JSON object with every run instead of a table."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def subject_of(arguments: BenchArguments, *, max_num_seqs: int, max_model_len: int) -> Subject:
    """What the options name.

    Args:
        arguments: of the command.
        max_num_seqs: that a worker of a new stack holds.
        max_model_len: of its longest request.

    Raises:
        click.UsageError: neither a model nor a server, or both.
    """
    model, server = arguments["model"], arguments["server"]
    if (model is None) == (server is None):
        raise click.UsageError("give either --model or --server")
    options = StackOptions(
        model=model or "",
        workers=arguments["workers"],
        overlap=arguments["overlap"],
        dtype=arguments["dtype"],
        threads=arguments["threads"],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(arguments["batched_tokens"], max_num_seqs),
        max_model_len=max_model_len,
    )
    return Subject(
        options=options,
        server=server,
        multiplexed=arguments["client"] == "multiplex",
        peers=arguments["vs"],
        with_roof=arguments["roof"],
    )


def measure_and_report(
    subject: Subject, cells_of: Callable[[int], Sequence[Callable[[int], Workload]]], arguments: BenchArguments
) -> None:
    """Runs the session and shows the figures; after an interruption or a failure, those of the runs before it."""
    findings = Findings()
    try:
        asyncio.run(run_session(subject, cells_of, arguments["rounds"], Console(stderr=True), findings))
    finally:
        if findings.figures:
            report(findings.figures, findings.peers, as_json=arguments["as_json"], plot_file=arguments["plot"])
