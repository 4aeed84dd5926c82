"""The command that replays traces."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from stepahead.scheduler.bench.replay import Replay, ReplayFailure, ReplayOptions
from stepahead.scheduler.bench.simulated_lane import DeviceSpeed
from stepahead.scheduler.bench.trace_files import TraceError, read_trace
from stepahead.scheduler.bench.trace_prompts import scaled
from stepahead.scheduler.bench.trace_report import TraceFigures, figures_of, trace_table
from stepahead.scheduler.core import LaneConfig, Ordering, SchedulerConfig
from stepahead.scheduler.core.invariants import InvariantViolation


@click.command()
@click.argument("files", nargs=-1, metavar="FILE...")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), envvar="STEPAHEAD_TRACES",
    help="Where FILEs are, and whose traces are all replayed if none is named. Also STEPAHEAD_TRACES.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Only the first N requests of each trace.")
@click.option("--scale", type=click.FloatRange(0.004, 4), default=1.0, help="Lengths are multiplied by this.")
@click.option("--speed", type=click.FloatRange(1e-3, 1e6), default=1.0, help="Requests come so many times faster.")
@click.option("--step-ms", type=click.FloatRange(0), default=6.0, help="A step takes this long ...")
@click.option("--token-us", type=click.FloatRange(0), default=20.0, help="... and this more per token it feeds.")
@click.option("--lanes", type=click.IntRange(1, 64), default=1, help="Workers.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, help="Sequences per worker at once.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=8192, help="Tokens per step.")
@click.option("--max-model-len", type=click.IntRange(2), default=262_144, help="Positions per sequence.")
@click.option("--num-blocks", type=click.IntRange(1), default=65_536, help="KV blocks per worker.")
@click.option("--block-size", type=click.IntRange(1), default=16, help="Tokens per KV block.")
@click.option("--overlap-depth", type=click.IntRange(0, 8), default=1, help="Steps planned ahead of results.")
@click.option("--prefix-caching/--no-prefix-caching", default=True, help="Share the KV of equal prefixes.")
@click.option(
    "--ordering", type=click.Choice([each.value for each in Ordering]), default=Ordering.FCFS.value,
    help="Who of the waiting goes first.",
)  # fmt: skip
@click.option("--tenants", type=click.IntRange(1), default=8, help="Synthetic tenants, the first the busiest.")
@click.option("--check-every", type=click.IntRange(0), default=1000, help="Steps per check of all invariants.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.pass_context
def traces(
    context: click.Context,
    files: tuple[str, ...],
    folder: Path | None,
    *,
    limit: int | None,
    scale: float,
    speed: float,
    ordering: str,
    as_json: bool,
    **values: float,
) -> None:
    """Replays recorded traces (Azure CSV, Mooncake JSON lines) through the core on simulated workers.

    Virtual time: a step takes step-ms + token-us per token. The defaults are about an 8-billion-parameter model on
    one large accelerator with room for a million tokens; attention over long contexts is not counted.
    """
    paths = _paths(files, folder)
    options = _options(values, Ordering(ordering))
    figures: list[TraceFigures] = []
    for path in paths:
        try:
            trace = scaled(read_trace(path, limit=limit), length_scale=scale, speed=speed)
            click.echo(f"{trace.name}: {len(trace.requests):,} requests", err=True)
            replay = Replay(trace, options)
            replay.run()
        except TraceError as error:
            raise click.UsageError(str(error)) from error
        except (ReplayFailure, InvariantViolation) as error:
            raise click.ClickException(f"{path.name}: {error}") from error
        figures.append(figures_of(trace, replay))
        # Millions of objects in cycles; the next replay's timing should not pay for them.
        del replay
        gc.collect()
    if as_json:
        click.echo(json.dumps({"options": context.params | {"folder": None}, "traces": list(map(asdict, figures))}))
        return
    Console(highlight=False, width=190).print(trace_table(figures))


def _paths(files: tuple[str, ...], folder: Path | None) -> list[Path]:
    if files:
        return [folder / file if folder is not None and not Path(file).exists() else Path(file) for file in files]
    if folder is None:
        raise click.UsageError("name trace FILEs, or a --folder of them (or set STEPAHEAD_TRACES)")
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".csv", ".jsonl"))
    if not paths:
        raise click.UsageError(f"--folder {folder}: holds no .csv or .jsonl file")
    return paths


def _options(values: dict[str, float], ordering: Ordering) -> ReplayOptions:
    def whole(name: str) -> int:
        return int(values[name])

    try:
        lane = LaneConfig(
            num_slots=whole("max_num_seqs") * (whole("overlap_depth") + 1),
            max_num_seqs=whole("max_num_seqs"),
            max_num_batched_tokens=whole("max_num_batched_tokens"),
            max_model_len=whole("max_model_len"),
            num_blocks=whole("num_blocks"),
            block_size=whole("block_size"),
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return ReplayOptions(
        lane=lane,
        num_lanes=whole("lanes"),
        speed=DeviceSpeed(round(values["step_ms"] * 1e6), round(values["token_us"] * 1e3)),
        scheduler=SchedulerConfig(
            overlap_depth=whole("overlap_depth"),
            ordering=ordering,
            prefix_caching=bool(values["prefix_caching"]),
        ),
        num_tenants=whole("tenants"),
        check_every=whole("check_every"),
    )
