"""`stepahead lab`: small experiments on the real services, with toy models whose arithmetic fits on a page."""

import click

from stepahead.cli.lazy_group import LazyGroup


class LabGroup(LazyGroup):
    """The experiments, one module each."""

    table = {  # noqa: RUF012 - declared a class variable by LazyGroup
        "generate": "stepahead.cli.lab_generate:generate",
        "reuse": "stepahead.cli.lab_reuse:reuse",
        "batch": "stepahead.cli.lab_batch:batch",
        "window": "stepahead.cli.lab_window:window",
        "boundary": "stepahead.cli.lab_boundary:boundary",
    }


@click.group(cls=LabGroup)
def lab() -> None:
    """Small experiments on the real services, each with figures you can work out by hand."""
