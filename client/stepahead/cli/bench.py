"""`stepahead bench`: measurements, as ratios taken side by side in one run."""

from typing import ClassVar

import click

from stepahead.cli.lazy_group import LazyGroup
from stepahead.cli.options import CONTEXT_SETTINGS


class BenchGroup(LazyGroup):
    """The measurements."""

    table: ClassVar = {
        "frontend": "stepahead.cli.bench_frontend:frontend",
        "overlap": "stepahead.cli.bench_overlap:overlap",
        "serve": "stepahead.cli.bench_serve:serve",
        "throughput": "stepahead.cli.bench_throughput:throughput",
        "scheduler": "stepahead.cli.bench_scheduler:scheduler",
        "traces": "stepahead.cli.bench_scheduler:traces",
    }


@click.group(cls=BenchGroup, context_settings=CONTEXT_SETTINGS)
def bench() -> None:
    """Measures this installation on this machine."""
