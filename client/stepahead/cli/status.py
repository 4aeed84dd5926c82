"""`stepahead status`: what the server is doing."""

import json

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.options import CONTEXT_SETTINGS, address_option, json_option
from stepahead.cli.rendering import status_object
from stepahead.client import Client, ServerStatus, WorkerStatus


@click.command(context_settings=CONTEXT_SETTINGS)
@address_option
@json_option("Print one JSON object.")
def status(address: str, *, as_json: bool) -> None:
    """Show what the scheduler and its workers are doing."""
    with Client(address) as client:
        current = client.status()
    if as_json:
        click.echo(json.dumps(status_object(current)))
        return
    console = Console()
    console.print(_summary(current))
    if current.workers:
        console.print(_worker_table(current.workers))


def _summary(status: ServerStatus) -> Table:
    totals = status.totals
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    rows.add_row("state", status.state.value.replace("_", " "))
    rows.add_row("model", status.model)
    rows.add_row("requests", f"{status.num_running} running, {status.num_waiting} waiting")
    rows.add_row(
        "since start",
        f"{totals.requests_accepted:,} accepted, {totals.requests_finished:,} finished, "
        f"{totals.requests_cancelled:,} cancelled, {totals.requests_failed:,} failed",
    )
    rows.add_row(
        "tokens",
        f"{totals.prefill_tokens:,} prompt, {totals.output_tokens:,} output, {totals.preemptions:,} preemptions",
    )
    rows.add_row("overlap depth", str(status.overlap_depth))
    rows.add_row("up for", f"{status.uptime_ns / 1e9:.0f} s, version {status.version}")
    return rows


def _worker_table(workers: tuple[WorkerStatus, ...]) -> Table:
    table = Table()
    table.add_column("worker", overflow="fold")
    for name in ("device", "running", "slots used", "blocks used", "overlapped", "idle", "gap p50/p99", "plan p99"):
        table.add_column(name, justify="right")
    for worker in workers:
        slots, blocks, steps = worker.slots, worker.blocks, worker.steps
        table.add_row(
            worker.address,
            worker.device if worker.connected else "not connected",
            str(worker.num_running),
            f"{slots.total - slots.free}/{slots.total}",
            f"{blocks.total - blocks.free:,}/{blocks.total:,}",
            _share(steps.overlap_share),
            _share(steps.idle_fraction),
            f"{steps.gap_ns_p50 / 1e6:.3f}/{steps.gap_ns_p99 / 1e6:.3f} ms",
            f"{steps.boundary_to_plan_ns_p99 / 1e6:.3f} ms",
        )
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
