"""One measurement: systems side by side, workloads in turn, figures per cell."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from stepahead.cli.bench_peers import Peer
from stepahead.cli.bench_processes import ForeignCpu, until_idle, yield_cores
from stepahead.cli.bench_roof import MachineSpeed, ModelWork, SpeedProbe, decode_roof_s, work_of
from stepahead.cli.bench_stats import percentile
from stepahead.cli.bench_systems import OwnSystem, System, TimedRun
from stepahead.cli.bench_workload import Workload, shortened
from stepahead.cli.failures import StackError
from stepahead.cli.local_services import passing_log_dir, require_extras
from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView
from stepahead.client.channel import open_aio_channel
from stepahead.v1 import generation_pb2, generation_pb2_grpc

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One workload on one system. None: the system does not tell, or there is no such thing."""

    system: str
    workload: str
    tokens_per_s: float
    """Output tokens, prompt processing included."""
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    """Between neighbouring tokens of a request, over all requests."""
    peak_mib: float | None
    """Resident memory of all its processes."""
    idle_fraction: float | None = None
    """Of the device, while work was waiting."""
    running_share: float | None = None
    """Step boundaries at which the next step was running."""
    boundary_to_plan_us_p99: float | None = None
    step_ms_p50: float | None = None
    """Of the worker's steps that were waited for: what the inter-token latency has on top is the engine's."""
    foreign_cpu_share: float | None = None
    """What others took of the cores meanwhile: a run beside a busy neighbour says little."""
    read_gb_per_s: float | None = None
    """The machine, measured next to the run."""
    gflop_per_s: float | None = None
    roof_fraction: float | None = None
    """The least time a decode step can take, over the median time between tokens."""


def figures_of(
    system: str, workload: Workload, run: TimedRun, speed: MachineSpeed | None, work: ModelWork | None
) -> RunFigures:
    """The figures of one run.

    Args:
        system: its name.
        workload: what ran; the roof takes all its requests to decode at once.
        run: what came of it.
        speed: of the machine, if it was measured.
        work: of the model, if it is known.
    """
    first = [1e3 * times[0] for times in run.token_times_s]
    gaps = [1e3 * (b - a) for times in run.token_times_s for a, b in itertools.pairwise(times)]
    itl_ms = percentile(gaps, 0.5)
    steps = run.steps
    roof = None
    if speed is not None and work is not None and itl_ms and workload.is_closed:
        roof = 1e3 * decode_roof_s(work, speed, len(workload.items), workload.mean_context) / itl_ms
    return RunFigures(
        system=system,
        workload=workload.name,
        tokens_per_s=run.tokens_per_s,
        ttft_ms_p50=percentile(first, 0.5),
        ttft_ms_p99=percentile(first, 0.99),
        itl_ms_p50=itl_ms,
        itl_ms_p99=percentile(gaps, 0.99),
        peak_mib=run.peak_bytes / 2**20 if run.peak_bytes else None,
        idle_fraction=None if steps is None else steps.idle_fraction,
        running_share=run.running_share,
        boundary_to_plan_us_p99=None if steps is None else steps.boundary_to_plan_us_p99,
        step_ms_p50=None if steps is None else steps.step_ms_p50,
        read_gb_per_s=None if speed is None else speed.read_bytes_per_s / 1e9,
        gflop_per_s=None if speed is None else speed.flops_per_s / 1e9,
        roof_fraction=roof,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured: a stack that is started for it, or a server that runs, and peers beside it."""

    options: StackOptions
    server: str | None
    """Its address; the options are not used then, and nothing is known of its processes."""
    multiplexed: bool
    peers: tuple[str, ...] = ()
    """Commands, see `Peer`."""
    with_roof: bool = True


class Session:
    """The systems, started, and the probe. Made by `open_session`."""

    def __init__(
        self, systems: Sequence[System], vocab_size: int, probe: SpeedProbe | None, work: ModelWork | None
    ) -> None:
        self.systems = tuple(systems)
        self.vocab_size = vocab_size
        self._probe = probe
        self._work = work

    async def measure(
        self, cells: Sequence[Callable[[int], Workload]], rounds: int, console: Console
    ) -> AsyncGenerator[RunFigures]:
        """Runs every cell `rounds` times on every system, systems in turn: A B A B. Yields each run's figures.

        Args:
            cells: each makes its workload of a round, -1 for the warm-up; every round has other prompts.
            rounds: repetitions.
            console: for the progress bar.

        Raises:
            StackError: a peer cannot run such a workload, or failed.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total}"))
        with Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("", total=len(cells) * (rounds + 1) * len(self.systems))
            for cell in cells:
                for number in range(-1, rounds):
                    workload = cell(number)
                    for system in self.systems:
                        self._check(system, workload)
                        what = "warm-up" if number < 0 else f"run {number + 1}"
                        bar.update(task, description=f"{workload.name}, {system.name}, {what}")
                        if number < 0:
                            await system.run(shortened(workload, WARM_UP_TOKENS))
                        else:
                            yield await self._one(system, workload)
                        bar.advance(task)

    async def _one(self, system: System, workload: Workload) -> RunFigures:
        await until_idle([pid for each in self.systems for pid in each.pids])
        before = None if self._probe is None else await self._probe.measure()
        foreign = ForeignCpu(system.pids)
        run = await system.run(workload)
        foreign_share = foreign.share()
        speed = before
        if before is not None and self._probe is not None:
            # The machine drifts; its speed during the run is taken to lie between the two.
            after = await self._probe.measure()
            speed = MachineSpeed(
                (before.read_bytes_per_s + after.read_bytes_per_s) / 2, (before.flops_per_s + after.flops_per_s) / 2
            )
        figures = figures_of(system.name, workload, run, speed, self._work)
        return replace(figures, foreign_cpu_share=foreign_share)

    @staticmethod
    def _check(system: System, workload: Workload) -> None:
        if not workload.is_closed and not system.open_loop:
            raise StackError(f"{system.name} takes no requests while others run: `bench throughput` compares it")


@dataclass(frozen=True, slots=True)
class Findings:
    """What a session has measured so far: an end half-way leaves what came before it."""

    figures: list[RunFigures] = field(default_factory=list[RunFigures])
    """Every run, in order."""
    peers: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    """What each peer says of itself."""


async def run_session(
    subject: Subject,
    cells_of: Callable[[int], Sequence[Callable[[int], Workload]]],
    rounds: int,
    console: Console,
    findings: Findings,
) -> None:
    """Starts everything, measures, stops everything.

    Args:
        subject: what.
        cells_of: makes the cells for a vocabulary's size; see `Session.measure`.
        rounds: repetitions.
        console: for progress.
        findings: where every run goes as soon as it has ended.
    """

    async def body(ready: StackReady | None) -> None:
        async with _open_session(subject, ready, findings.peers) as session:
            yield_cores()  # not before: the peers inherit it
            async for figures in session.measure(cells_of(session.vocab_size), rounds, console):
                findings.figures.append(figures)

    if subject.server is not None:
        await body(None)
    else:
        require_extras("scheduler", "worker")
        with passing_log_dir(verbose=False) as log_dir, ConsoleView(Console(stderr=True, quiet=True)) as view:
            await run_stack(Stack(subject.options, view, log_dir=log_dir), body)


@asynccontextmanager
async def _open_session(
    subject: Subject, ready: StackReady | None, facts: dict[str, dict[str, object]]
) -> AsyncGenerator[Session]:
    address = ready.address if ready is not None else subject.server
    assert address is not None
    pids = () if ready is None else (ready.scheduler_pid, *ready.worker_pids)
    work = None if ready is None else work_of(ready.workers[0])
    async with AsyncExitStack() as stack, open_aio_channel(address) as channel:
        models = generation_pb2_grpc.ModelServiceStub(channel)
        model = await models.GetModel(generation_pb2.GetModelRequest())
        probe = None
        if work is not None and subject.with_roof:
            probe = await stack.enter_async_context(SpeedProbe(work.weight_bytes, subject.options.threads))
        systems: list[System] = [OwnSystem(address, pids, multiplexed=subject.multiplexed)]
        for command in subject.peers:
            peer = await stack.enter_async_context(Peer(command))
            facts[peer.name] = peer.facts
            systems.append(peer)
        yield Session(systems, model.vocab_size, probe, work)
