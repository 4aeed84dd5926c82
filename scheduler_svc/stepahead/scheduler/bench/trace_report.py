"""The figures of replayed traces, as values, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from stepahead.scheduler.bench.fairness import jain_index
from stepahead.scheduler.bench.percentiles import percentile
from stepahead.scheduler.bench.replay import Replay
from stepahead.scheduler.bench.trace_files import Trace
from stepahead.scheduler.bench.trace_prompts import reuse_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFigures:
    """One replayed trace. Times are virtual, except for wall_s."""

    trace: str
    num_requests: int
    num_refused: int
    """Requests that fit no lane."""
    num_prompt_tokens: int
    num_output_tokens: int
    virtual_s: float
    device_busy: float
    """Share of the virtual time in which lanes ran steps."""
    queue_ms_p50: float
    queue_ms_p99: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    preemptions_per_1000_tokens: float
    prefix_hit_rate: float
    """Share of the admitted prompt tokens that the core's prefix cache had."""
    trace_reuse_blocks: float | None
    """Share of prompt blocks that an earlier request of the trace has too; None: the trace does not say."""
    trace_reuse_tokens: float | None
    """The same in tokens: what an unbounded cache that fills in no time would hit."""
    jain_index: float | None
    """Over the tenants' tokens per second under contention; None: nobody had to compete."""
    num_tenants_competing: int
    num_steps: int
    num_invariant_checks: int
    wall_s: float
    calls_per_s: float
    """add_request, plan and commit calls per second of the replay, its own bookkeeping included."""
    tokens_per_s: float
    """Output tokens per second of the replay."""


def figures_of(trace: Trace, replay: Replay) -> TraceFigures:
    """The figures of a replay that has run."""
    totals = replay.scheduler.totals
    rates = replay.service.rates()
    reuse = reuse_of(trace)
    elapsed_ns = max(1, replay.now_ns) * len(replay.lanes)
    return TraceFigures(
        trace=trace.name,
        num_requests=len(trace.requests),
        num_refused=replay.num_refused,
        num_prompt_tokens=replay.num_admitted_prompt_tokens,
        num_output_tokens=totals.output_tokens,
        virtual_s=replay.now_ns / 1e9,
        device_busy=sum(lane.busy_ns for lane in replay.lanes) / elapsed_ns,
        queue_ms_p50=percentile(replay.queue_ns, 0.5) / 1e6,
        queue_ms_p99=percentile(replay.queue_ns, 0.99) / 1e6,
        ttft_ms_p50=percentile(replay.ttft_ns, 0.5) / 1e6,
        ttft_ms_p99=percentile(replay.ttft_ns, 0.99) / 1e6,
        itl_ms_p50=percentile(replay.itl_ns, 0.5) / 1e6,
        itl_ms_p99=percentile(replay.itl_ns, 0.99) / 1e6,
        preemptions_per_1000_tokens=1000 * totals.preemptions / max(1, totals.output_tokens),
        prefix_hit_rate=replay.num_cached_tokens / max(1, replay.num_admitted_prompt_tokens),
        trace_reuse_blocks=None if reuse is None else reuse[0],
        trace_reuse_tokens=None if reuse is None else reuse[1],
        jain_index=jain_index(rates) if len(rates) >= 2 else None,
        num_tenants_competing=len(rates),
        num_steps=replay.num_steps,
        num_invariant_checks=replay.num_checks,
        wall_s=replay.wall_s,
        calls_per_s=replay.num_calls / replay.wall_s,
        tokens_per_s=totals.output_tokens / replay.wall_s,
    )


def trace_table(figures: Sequence[TraceFigures]) -> Table:
    """One line per trace."""
    drawn = Table(title="traces replayed in virtual time")
    drawn.add_column("trace")
    for name in (
        "requests", "busy %", "queue ms p50/p99", "TTFT ms p50/p99", "ITL ms p99", "preempt/1000", "hits %",
        "reuse %", "Jain", "steps", "checks", "wall s", "calls/s",
    ):  # fmt: skip
        drawn.add_column(name, justify="right")
    for each in figures:
        refused = f" ({each.num_refused} refused)" if each.num_refused else ""
        drawn.add_row(
            each.trace,
            f"{each.num_requests:,}{refused}",
            f"{100 * each.device_busy:.0f}",
            f"{each.queue_ms_p50:,.0f}/{each.queue_ms_p99:,.0f}",
            f"{each.ttft_ms_p50:,.0f}/{each.ttft_ms_p99:,.0f}",
            f"{each.itl_ms_p99:.1f}",
            f"{each.preemptions_per_1000_tokens:.2f}",
            f"{100 * each.prefix_hit_rate:.1f}",
            "-" if each.trace_reuse_tokens is None else f"{100 * each.trace_reuse_tokens:.1f}",
            "-" if each.jain_index is None else f"{each.jain_index:.3f}",
            f"{each.num_steps:,}",
            str(each.num_invariant_checks),
            f"{each.wall_s:.1f}",
            f"{each.calls_per_s:,.0f}",
        )
    return drawn
