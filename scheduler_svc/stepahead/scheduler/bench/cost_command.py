"""The command that times the core, alone or beside vLLM's scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from typing_extensions import override

from stepahead.scheduler.bench.cost import PeerOption, measure, remarks, report, table
from stepahead.scheduler.bench.subjects import PeerProcess, SubjectFailed
from stepahead.scheduler.bench.workloads import WORKLOADS

_PEER_SCRIPT = Path(__file__).parents[4] / "scripts" / "bench_vllm_scheduler.py"
"""Beside the sources; an installed package does not have it."""


class RowCounts(click.ParamType[tuple[int, ...]]):
    """Widths separated by commas."""

    name = "N,N,..."

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parses the option's text."""
        counts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and 8 <= int(part) <= 4096 for part in counts):
            self.fail(f"{value!r} is no list of row counts such as 8,64,256 (8 to 4096 each)", param, ctx)
        return tuple(map(int, counts))


@click.command()
@click.option("--rows", type=RowCounts(), default="8,64,256,1024", help="Running requests.")
@click.option(
    "--scenario", "scenarios", multiple=True, type=click.Choice(list(WORKLOADS)), default=tuple(WORKLOADS),
    help="Repeatable; all of them unless given.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(6, 3000), default=300, help="Timed steps per figure.")
@click.option(
    "--vs-vllm", type=click.Path(path_type=Path), metavar="PYTHON",
    help="Interpreter of an environment with vLLM: its V1 scheduler is measured in the same run.",
)  # fmt: skip
@click.option(
    "--vllm-scheduler", type=click.Choice(["sync", "async"]), default="sync",
    help="Which of its schedulers; async is the one that also plans ahead, and the slower one.",
)  # fmt: skip
@click.option(
    "--vllm-script", type=click.Path(path_type=Path), default=_PEER_SCRIPT, help="The far end, of the source tree."
)
@click.option("--prefix-caching/--no-prefix-caching", default=True, help="For every scheduler alike.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def scheduler(
    *,
    rows: tuple[int, ...],
    scenarios: tuple[str, ...],
    steps: int,
    vs_vllm: Path | None,
    vllm_scheduler: str,
    vllm_script: Path,
    prefix_caching: bool,
    as_json: bool,
) -> None:
    """Times one step of the core: plan, commit, and one list append per token.

    Each figure is measured for the core alone and with its wire messages encoded and decoded, at overlap depth 1.
    """
    peer = None
    try:
        if vs_vllm is not None:
            peer = PeerOption(PeerProcess(vs_vllm, vllm_script), vllm_scheduler)
        cells = measure(
            scenarios,
            rows,
            num_steps=steps,
            prefix_caching=prefix_caching,
            peer=peer,
            progress=lambda line: click.echo(line, err=True),
        )
    except SubjectFailed as error:
        raise click.ClickException(str(error)) from error
    finally:
        if peer is not None:
            peer.process.close()
    if as_json:
        click.echo(json.dumps(report(cells)))
        return
    Console(highlight=False, width=170).print(table(cells))
    for line in remarks(cells):
        click.echo(line)
