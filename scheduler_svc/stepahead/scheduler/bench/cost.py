"""Microseconds per step, all subjects side by side: they take turns, so that a slow moment falls on each."""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from stepahead.scheduler.bench.percentiles import percentile
from stepahead.scheduler.bench.subjects import CoreSubject, PeerProcess, PeerSubject, Samples, Subject
from stepahead.scheduler.bench.workloads import WORKLOADS, Workload

NUM_ROUNDS = 6
"""Turns that each subject gets per cell."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds per step."""

    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, samples_ns: Sequence[int]) -> Spread:
        """The spread of steps timed in nanoseconds."""
        return cls(
            percentile(samples_ns, 0.5) / 1e3,
            percentile(samples_ns, 0.99) / 1e3,
            statistics.fmean(samples_ns) / 1e3,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One subject under one load."""

    scenario: str
    num_rows: int
    subject: str
    num_steps: int
    tokens_per_step: float
    cpu_us: Spread
    """Process time: what a busy machine does not add to. Ratios are taken of its medians."""
    wall_us: Spread
    submit_us: float | None
    """Median wall time of accepting one request, which is not part of a step; None: none came."""


@dataclass(frozen=True, slots=True)
class PeerOption:
    """Another scheduler to measure beside ours."""

    process: PeerProcess
    scheduler: str
    """"sync" or "async": which of vLLM's V1 schedulers."""


def measure(
    scenarios: Sequence[str],
    rows: Sequence[int],
    *,
    num_steps: int,
    prefix_caching: bool = True,
    peer: PeerOption | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> list[Cell]:
    """Times every scenario at every width; `progress` gets a line per cell."""
    cells: list[Cell] = []
    for scenario in scenarios:
        for num_rows in rows:
            workload = WORKLOADS[scenario](num_rows)
            measured = list(
                _measure_side_by_side(scenario, workload, num_steps, peer, prefix_caching=prefix_caching)
            )
            cells += measured
            figures = ", ".join(f"{cell.subject} {cell.cpu_us.p50:,.1f}" for cell in measured)
            progress(f"{workload.name}, {num_rows} rows: {figures} us per step")
    return cells


def _measure_side_by_side(
    scenario: str, workload: Workload, num_steps: int, peer: PeerOption | None, *, prefix_caching: bool
) -> Iterator[Cell]:
    subjects: list[Subject] = [
        CoreSubject(workload, on_wire=on_wire, prefix_caching=prefix_caching) for on_wire in (False, True)
    ]
    if peer is not None:
        subjects.append(
            PeerSubject(
                peer.process,
                scenario=scenario,
                num_rows=workload.num_rows,
                scheduler=peer.scheduler,
                prefix_caching=prefix_caching,
            )
        )
    totals = [Samples() for _ in subjects]
    # Short turns: a slow second of the machine then falls on every subject.
    steps_per_round = -(-num_steps // NUM_ROUNDS)
    for _ in range(NUM_ROUNDS):
        for subject, total in zip(subjects, totals, strict=True):
            total.extend(subject.run(steps_per_round))
    for subject, total in zip(subjects, totals, strict=True):
        yield Cell(
            scenario=workload.name,
            num_rows=workload.num_rows,
            subject=subject.name,
            num_steps=len(total.wall_ns),
            tokens_per_step=total.num_tokens / len(total.wall_ns),
            cpu_us=Spread.of(total.cpu_ns),
            wall_us=Spread.of(total.wall_ns),
            submit_us=percentile(total.submit_ns, 0.5) / 1e3 if total.submit_ns else None,
        )
    # What this cell leaves behind must not be looked through in the next one.
    del subjects
    gc.unfreeze()
    gc.collect()


def ratios(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """How often our two subjects fit into each other one, per scenario and width, by median process time."""
    return [
        {
            "scenario": scenario,
            "num_rows": num_rows,
            "subject": other.subject,
            "over_core": other.cpu_us.p50 / group[0].cpu_us.p50,
            "over_core_and_wire": other.cpu_us.p50 / group[1].cpu_us.p50,
        }
        for (scenario, num_rows), group in _grouped(cells).items()
        for other in group[2:]
    ]


def growth(cells: Sequence[Cell], wide: int = 1024, narrow: int = 256) -> list[dict[str, object]]:
    """Cost at `wide` rows over cost at `narrow` rows, per scenario and subject that was measured at both."""
    p50 = {(cell.scenario, cell.subject, cell.num_rows): cell.cpu_us.p50 for cell in cells}
    return [
        {"scenario": scenario, "subject": subject, "ratio": cost / p50[scenario, subject, narrow]}
        for (scenario, subject, num_rows), cost in p50.items()
        if num_rows == wide and (scenario, subject, narrow) in p50
    ]


def report(cells: Sequence[Cell]) -> dict[str, object]:
    """Everything measured, for JSON."""
    return {
        "unit": "microseconds per step",
        "load_average": os.getloadavg()[0],
        "num_cpus": os.cpu_count(),
        "cells": [asdict(cell) for cell in cells],
        "ratios": ratios(cells),
        "growth_1024_over_256": growth(cells),
    }


def table(cells: Sequence[Cell]) -> Table:
    """One line per scenario and width."""
    subjects = list(dict.fromkeys(cell.subject for cell in cells))
    drawn = Table(title="microseconds per step: plan, commit, one list append per token (p50 / p99)")
    drawn.add_column("scenario")
    for name in ("rows", "tokens"):
        drawn.add_column(name, justify="right")
    for name in subjects:
        drawn.add_column(f"{name} cpu", justify="right")
        drawn.add_column("wall", justify="right", style="dim")
    for _ in subjects[2:]:
        drawn.add_column("x core", justify="right", style="bold")
        drawn.add_column("x wire", justify="right", style="bold")
    for (scenario, num_rows), group in _grouped(cells).items():
        columns = [f"{group[0].tokens_per_step:,.0f}"]
        for cell in group:
            columns += [f"{_short(spread.p50)} / {_short(spread.p99)}" for spread in (cell.cpu_us, cell.wall_us)]
        for cell in group[2:]:
            columns += [f"{cell.cpu_us.p50 / ours.cpu_us.p50:.1f}" for ours in group[:2]]
        drawn.add_row(scenario, str(num_rows), *columns)
    return drawn


def remarks(cells: Sequence[Cell]) -> Iterator[str]:
    """Lines below the table: how cost grows, what a submission costs, and how far to trust the figures."""
    for row in growth(cells):
        yield f"{row['scenario']}, {row['subject']}: 1024 rows cost {row['ratio']:.2f} x 256 rows"
    submits: dict[str, list[float]] = {}
    for cell in cells:
        if cell.submit_us is not None:
            submits.setdefault(cell.subject, []).append(cell.submit_us)
    for subject, values in submits.items():
        yield f"{subject}: accepting a request costs {statistics.median(values):.1f} us (not in the table)"
    load, num_cpus = os.getloadavg()[0], os.cpu_count() or 1
    yield f"load average {load:.1f} on {num_cpus} cores" + (
        ": others were running, so wall times are too high and process times somewhat" if load > 1.2 else ""
    )


def _short(value_us: float) -> str:
    return f"{value_us:.1f}" if value_us < 100 else f"{value_us:,.0f}"


def _grouped(cells: Sequence[Cell]) -> dict[tuple[str, int], list[Cell]]:
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.scenario, cell.num_rows), []).append(cell)
    return groups
