"""`python -m stepahead.scheduler.bench`: the commands behind `stepahead bench scheduler` and `... traces`."""

from __future__ import annotations

import click

from stepahead.scheduler.bench.cost_command import scheduler


@click.group(context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measures the scheduler core without a worker."""


main.add_command(scheduler)

if __name__ == "__main__":
    main()
