"""`stepahead status`: what the server is doing."""

import json

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.options import CONTEXT_SETTINGS, address_option, json_option
from stepahead.cli.rendering import status_object
from stepahead.client import Client, ServerStatus, WorkerStatus

_MAX_WORKER_COLUMNS = 3


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
    # Each choice of a request is one.
    rows.add_row("sequences", f"{status.num_running} running, {status.num_waiting} waiting")
    rows.add_row(
        "requests",
        f"since start {totals.requests_accepted:,} accepted, {totals.requests_finished:,} finished, "
        f"{totals.requests_cancelled:,} cancelled, {totals.requests_failed:,} failed",
    )
    rows.add_row(
        "tokens",
        f"{totals.prefill_tokens:,} prompt, {totals.output_tokens:,} output, {totals.preemptions:,} preemptions",
    )
    if totals.window_replays:
        replays = f"{totals.window_replays:,} of windows alone, {totals.approximate_replays:,} of them approximate"
        rows.add_row("replays", replays)
    rows.add_row("overlap depth", str(status.overlap_depth))
    rows.add_row("up for", f"{status.uptime_ns / 1e9:.0f} s, version {status.version}")
    return rows


def _worker_table(workers: tuple[WorkerStatus, ...]) -> Table:
    """One column per worker while they fit next to each other, else one row per worker."""
    columns = [_worker_facts(worker) for worker in workers]
    names = list(columns[0])
    table = Table()
    if len(workers) <= _MAX_WORKER_COLUMNS:
        table.add_column("worker", style="bold")
        for worker in workers:
            table.add_column(worker.address, overflow="fold")
        for name in names:
            table.add_row(name, *[facts[name] for facts in columns])
    else:
        table.add_column("worker", overflow="fold")
        for name in names:
            table.add_column(name, justify="right")
        for worker, facts in zip(workers, columns, strict=True):
            table.add_row(worker.address, *facts.values())
    return table


def _worker_facts(worker: WorkerStatus) -> dict[str, str]:
    slots, blocks, steps = worker.slots, worker.blocks, worker.steps
    return {
        "device": worker.device if worker.connected else "not connected",
        "running": str(worker.num_running),
        "slots used": f"{slots.total - slots.free} of {slots.total}",
        "blocks used": f"{blocks.total - blocks.free:,} of {blocks.total:,}",
        "overlapped": _share(steps.overlap_share),
        "idle": _share(steps.idle_fraction),
        "gap p50, p99": f"{steps.gap_ns_p50 / 1e6:.3f}, {steps.gap_ns_p99 / 1e6:.3f} ms",
        "plan p99": f"{steps.boundary_to_plan_ns_p99 / 1e6:.3f} ms",
    }


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
