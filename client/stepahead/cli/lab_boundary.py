"""`stepahead lab boundary`: whose results each call brings back, and whose it leaves for the next one.

One request: its prompt, two decode steps, a flush. The worker holds the end of a retained step back until its next
command (`--hold-events`), and prompt steps are waited for in place (`--settle-prompts in-place`), so that the table
says what the protocol does and not how fast the machine is. Everything is read from recorded StepBoundary messages:
a step settled in place brings its own results; a boundary that names a running step came with that step's call; one
that names none came with the flush.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.failures import StackError
from stepahead.cli.lab_session import RecordedStep, lab_session, on_paper, on_stack, run_experiment, show_facts
from stepahead.cli.options import CONTEXT_SETTINGS
from stepahead.cli.stack import StackOptions

OVERLAPS = ("on", "off")
PROMPT = (1, 2, 3, 5)
CALLS = ("last prompt chunk", "decode D1", "decode D2", "flush")
STEPS = ("prompt", "D1", "D2")
FLUSH = len(STEPS) + 1
"""The call after the last step's."""


@dataclass(frozen=True, slots=True)
class Call:
    """A command to the worker: whose results it brought back, and whose were left in the worker after it."""

    processed: tuple[str, ...]
    retained: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    calls: tuple[Call, ...]
    num_waiting: int
    """Requests in the queue before the flush."""
    num_in_flight: int
    """Steps whose results were missing then."""
    num_known: int
    """Tokens committed by then."""
    token_ids: tuple[int, ...]


GOLDEN: Mapping[str, Outcome] = {
    "on": Outcome(
        (Call(("prompt",), ()), Call((), ("D1",)), Call(("D1",), ("D2",)), Call(("D2",), ())),
        num_waiting=0,
        num_in_flight=1,
        num_known=2,
        token_ids=(1, 2, 4),
    ),
    "off": Outcome(
        (Call(("prompt",), ()), Call(("D1",), ()), Call(("D2",), ()), Call((), ())),
        num_waiting=0,
        num_in_flight=0,
        num_known=3,
        token_ids=(1, 2, 4),
    ),
}


def options(overlap: str) -> StackOptions:
    """A worker that ends steps at commands, with and without overlap."""
    return StackOptions(
        model="toy:running-sum",
        overlap=overlap,
        worker_flags=("--hold-events",),
        scheduler_flags=("--settle-prompts", "in-place", "--record-steps"),
    )


async def play(address: str, overlap: str) -> Outcome:
    """Plays once on a fresh stack."""
    num_held = 1 if overlap == "on" else 0
    async with lab_session(address) as session:
        reply = await session.ask(PROMPT, len(STEPS))
        status = await session.until(
            lambda status: (
                status.workers[0].steps.last_dispatched_step_id == len(STEPS)
                and status.workers[0].steps.last_committed_step_id == len(STEPS) - num_held
            )
        )
        steps = status.workers[0].steps
        num_known = status.totals.output_tokens
        num_flushed = await session.flush()
        token_ids = await reply.tokens()
        calls = read_calls(await session.steps(), num_flushed)
    return Outcome(
        calls=calls,
        num_waiting=status.num_waiting,
        num_in_flight=steps.last_dispatched_step_id - steps.last_committed_step_id,
        num_known=num_known,
        token_ids=token_ids,
    )


def read_calls(steps: Sequence[RecordedStep], num_flushed: int) -> tuple[Call, ...]:
    """Recorded boundaries to calls; call k is the plan of step k, the last one the flush.

    Raises:
        StackError: the flush brought another number of boundaries than the boundaries themselves say.
    """
    if [step.step_id for step in steps] != [1, 2, 3]:
        raise StackError(f"recorded steps {[step.step_id for step in steps]} instead of 1, 2, 3")
    settled_in = {step.step_id: _settling_call(step) for step in steps}
    num_said = sum(call == FLUSH for call in settled_in.values())
    if num_said != num_flushed:
        raise StackError(f"the flush brought {num_flushed} boundaries, {num_said} boundaries say so")
    return tuple(
        Call(
            processed=tuple(STEPS[step_id - 1] for step_id, settled in settled_in.items() if settled == call),
            retained=tuple(
                STEPS[step_id - 1] for step_id, settled in settled_in.items() if step_id <= call < settled
            ),
        )
        for call in range(1, FLUSH + 1)
    )


def _settling_call(step: RecordedStep) -> int:
    if step.settled_in_place:
        return step.step_id
    return step.running_step_id or FLUSH


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("-v", "--verbose", is_flag=True, help="Show the services' logs on stderr.")
def boundary(*, verbose: bool) -> None:
    """Follow the previous-step boundary from call to call, with overlap on and off."""
    outcomes = run_experiment(_play_all, verbose=verbose)
    _show(outcomes)
    if outcomes != GOLDEN:
        raise StackError("a table differs from the one on paper")


async def _play_all(log_dir: Path | None) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for overlap in OVERLAPS:

        async def play_one(address: str, overlap: str = overlap) -> Outcome:
            return await play(address, overlap)

        outcomes[overlap] = await on_stack(options(overlap), play_one, log_dir)
    return outcomes


def _show(outcomes: Mapping[str, Outcome]) -> None:
    console = Console(highlight=False)
    console.print("One request of three tokens: its prompt, two decode steps, a flush.\n", style="bold")
    table = Table()
    table.add_column("call", no_wrap=True)
    for overlap in OVERLAPS:
        table.add_column(f"overlap {overlap}\nprocessed", no_wrap=True)
        table.add_column("then\nretained", no_wrap=True)
    for index, name in enumerate(CALLS):
        cells: list[str] = []
        for overlap in OVERLAPS:
            call = outcomes[overlap].calls[index]
            cells += [", ".join(call.processed) or "none", ", ".join(call.retained) or "none"]
        table.add_row(name, *cells)
    console.print(table)
    facts = [
        (
            f"overlap {overlap}",
            f"before the flush: {outcome.num_waiting} waiting, {outcome.num_in_flight} in flight, "
            f"{outcome.num_known} of {len(outcome.token_ids)} tokens known",
        )
        for overlap, outcome in outcomes.items()
    ]
    facts += [
        ("shows", "with overlap a step's results come with the next command, and the tokens are the same"),
        ("", "an empty queue does not mean that the work is done: a flush still has results (rules A8, D9)"),
        ("on paper", on_paper(agrees=outcomes == GOLDEN)),
    ]
    show_facts(console, facts)
