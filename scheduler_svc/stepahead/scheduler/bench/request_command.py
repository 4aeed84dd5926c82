"""The command that writes a trace's requests, for `stepahead bench serve`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stepahead.scheduler.bench.trace_files import TraceError, read_trace
from stepahead.scheduler.bench.trace_prompts import scaled


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(1), help="Only the first N requests.")
@click.option("--scale", type=click.FloatRange(0.004, 4), default=1.0, help="Lengths are multiplied by this.")
@click.option("--speed", type=click.FloatRange(1e-3, 1e6), default=1.0, help="Requests come so many times faster.")
def requests(file: Path, *, limit: int | None, scale: float, speed: float) -> None:
    """Writes one JSON line per request: its time, its lengths, and which blocks its prompt is made of."""
    try:
        trace = scaled(read_trace(file, limit=limit), length_scale=scale, speed=speed)
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    for request in trace.requests:
        fields = {
            "at_s": request.arrival_ns / 1e9,
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": max(1, request.num_output_tokens),
            "blocks": request.block_hashes,
            "block_tokens": trace.block_tokens,
        }
        click.echo(json.dumps(fields))
