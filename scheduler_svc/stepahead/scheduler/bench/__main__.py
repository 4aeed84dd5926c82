"""`python -m stepahead.scheduler.bench`: the commands behind `stepahead bench scheduler`, `traces` and `serve`."""

from __future__ import annotations

import click

from stepahead.scheduler.bench.cost_command import scheduler
from stepahead.scheduler.bench.request_command import requests
from stepahead.scheduler.bench.trace_command import traces
from stepahead.scheduler.entry import run_quietly


@click.group(
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"], "show_default": True}
)
def main() -> None:
    """Measures the scheduler core without a worker."""


main.add_command(requests)
main.add_command(scheduler)
main.add_command(traces)

if __name__ == "__main__":
    run_quietly(main)
