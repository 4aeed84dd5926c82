"""How the figures of `bench throughput` and `bench serve` are shown: a table, ratios, JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.bench_plot import Bar, BarGroup, bar_chart
from stepahead.cli.bench_session import RunFigures
from stepahead.cli.bench_stats import Spread, ratios, spread_of
from stepahead.cli.bench_systems import OURS

_Value = Callable[[RunFigures], float | None]

_COLUMNS: tuple[tuple[str, _Value, str, float], ...] = (
    ("tok/s", lambda run: run.tokens_per_s, "{:,.0f}", 1),
    ("TTFT p50", lambda run: run.ttft_ms_p50, "{:,.0f}", 1),
    ("p99 ms", lambda run: run.ttft_ms_p99, "{:,.0f}", 1),
    ("ITL p50", lambda run: run.itl_ms_p50, "{:.1f}", 1),
    ("p99 ms", lambda run: run.itl_ms_p99, "{:.1f}", 1),
    ("step ms", lambda run: run.step_ms_p50, "{:.1f}", 1),
    ("MiB", lambda run: run.peak_mib, "{:,.0f}", 1),
    ("idle %", lambda run: run.idle_fraction, "{:.2f}", 100),
    ("running %", lambda run: run.running_share, "{:.0f}", 100),
    ("to plan p99 us", lambda run: run.boundary_to_plan_us_p99, "{:.0f}", 1),
    ("others %", lambda run: run.foreign_cpu_share, "{:.0f}", 100),
    ("read GB/s", lambda run: run.read_gb_per_s, "{:.0f}", 1),
    ("of roof %", lambda run: run.roof_fraction, "{:.0f}", 100),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over a peer's, for one workload."""

    workload: str
    peer: str
    tokens_per_s: Spread
    ttft_p99: Spread
    """Below 1 is better."""


def cells(figures: Sequence[RunFigures]) -> dict[tuple[str, str], list[RunFigures]]:
    """Runs by (workload, system), in the order they came."""
    found: dict[tuple[str, str], list[RunFigures]] = {}
    for run in figures:
        found.setdefault((run.workload, run.system), []).append(run)
    return found


def ratios_of(figures: Sequence[RunFigures]) -> list[Ratio]:
    """Ours over each peer's, run by run."""
    by_cell = cells(figures)
    found: list[Ratio] = []
    for (workload, system), theirs in by_cell.items():
        if system == OURS:
            continue
        # An interrupted round has a run of ours alone.
        ours = by_cell[workload, OURS][: len(theirs)]
        found.append(
            Ratio(
                workload,
                system,
                ratios([run.tokens_per_s for run in ours], [run.tokens_per_s for run in theirs]),
                ratios([run.ttft_ms_p99 for run in ours], [run.ttft_ms_p99 for run in theirs]),
            )
        )
    return found


def _shown(runs: Sequence[RunFigures], value: _Value, style: str, factor: float) -> str:
    values = [each * factor for each in map(value, runs) if each is not None]
    return style.format(spread_of(values).median) if values else "-"


def table(figures: Sequence[RunFigures]) -> Table:
    """Medians per workload and system; of the tokens per second also the smallest and the largest."""
    shown = Table(title="medians over the runs")
    shown.add_column("workload")
    shown.add_column("system")
    for name, *_ in _COLUMNS:
        shown.add_column(name, justify="right")
    for (workload, system), runs in cells(figures).items():
        values = [_shown(runs, *column[1:]) for column in _COLUMNS]
        speed = spread_of([run.tokens_per_s for run in runs])
        if speed.count > 1:
            values[0] += f" ({speed.low:,.0f}..{speed.high:,.0f})"
        shown.add_row(workload, system, *values)
    return shown


def _ratio_lines(found: Sequence[Ratio]) -> list[str]:
    def text(spread: Spread) -> str:
        return f"{spread.median:.2f} ({spread.low:.2f}..{spread.high:.2f})"

    return [
        f"{ratio.workload}: {OURS} / {ratio.peer}: {text(ratio.tokens_per_s)} x the tokens per second, "
        f"{text(ratio.ttft_p99)} x the TTFT p99"
        for ratio in found
    ]


def plot(figures: Sequence[RunFigures]) -> str:
    """Tokens per second as an SVG: a group per workload, a bar per system, the spread as a line."""
    groups: dict[str, list[Bar]] = {}
    for (workload, system), runs in cells(figures).items():
        spread = spread_of([run.tokens_per_s for run in runs])
        groups.setdefault(workload, []).append(Bar(system, spread.median, spread.low, spread.high))
    return bar_chart("output tokens per second", [BarGroup(name, tuple(bars)) for name, bars in groups.items()])


def report(
    figures: Sequence[RunFigures], facts: Mapping[str, object], *, as_json: bool, plot_file: Path | None
) -> None:
    """Prints the figures, and writes the plot if one is wanted."""
    if plot_file is not None:
        plot_file.write_text(plot(figures), encoding="utf-8")
    found = ratios_of(figures)
    if as_json:
        runs = [asdict(run) for run in figures]
        click.echo(json.dumps({"runs": runs, "ratios": [asdict(each) for each in found], "peers": facts}))
        return
    Console(highlight=False, width=165).print(table(figures))
    for line in _ratio_lines(found):
        click.echo(line)
