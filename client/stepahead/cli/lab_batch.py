"""`stepahead lab batch`: who holds which slot in which round, with fixed batches and with refilling.

The worker takes two requests at a time. It is told when to end a step (`--single-step`), so everybody can arrive
before the first round: an opener, a request of one token, holds the device until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.failures import StackError
from stepahead.cli.lab_session import (
    MAX_FLUSHES,
    RecordedStep,
    lab_session,
    on_paper,
    on_stack,
    run_experiment,
    show_facts,
)
from stepahead.cli.options import CONTEXT_SETTINGS
from stepahead.cli.stack import StackOptions

NUM_SLOTS = 2
OPENER = (9,)
NAMES: dict[tuple[int, ...], str] = {(1,): "A", (2,): "B", (3,): "C"}
"""Requests by their prompts."""


@dataclass(frozen=True, slots=True)
class Case:
    """A policy ("fixed" or "continuous"), how many tokens A, B and C need, and when C arrives."""

    policy: str
    lengths: tuple[int, int, int] = (2, 4, 1)
    late: int | None = None
    """C arrives at the start of this round; None: with the others."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rounds, one text per round with a name or a dash per slot."""

    rounds: tuple[str, ...]
    finish: tuple[tuple[str, int], ...]
    """The last round of each request."""
    num_tokens: int

    @property
    def num_unused(self) -> int:
        """Slots nobody held, over all rounds."""
        return sum(row.count("-") for row in self.rounds)


@dataclass(frozen=True, slots=True)
class Golden:
    """A case and what it gives on paper."""

    title: str
    case: Case
    outcome: Outcome


def _outcome(rounds: str, a: int, b: int, c: int, num_tokens: int) -> Outcome:
    return Outcome(tuple(rounds.split()), (("A", a), ("B", b), ("C", c)), num_tokens)


GOLDEN = (
    Golden("fixed (2 4 1)", Case("fixed"), _outcome("AB AB -B -B C-", 2, 4, 5, 7)),
    Golden("refilling (2 4 1)", Case("continuous"), _outcome("AB AB CB -B", 2, 4, 3, 7)),
    Golden(
        "refilling (2 4 1), C late",
        Case("continuous", late=4),
        _outcome("AB AB -B CB", 2, 4, 4, 7),
    ),
    Golden(
        "fixed (4 4 1)",
        Case("fixed", (4, 4, 1)),
        _outcome("AB AB AB AB C-", 4, 4, 5, 9),
    ),
    Golden(
        "refilling (4 4 1)",
        Case("continuous", (4, 4, 1)),
        _outcome("AB AB AB AB C-", 4, 4, 5, 9),
    ),
)


def options(policy: str) -> StackOptions:
    """Two slots, one step at a time."""
    return StackOptions(
        model="toy:running-sum",
        overlap="off",
        max_num_seqs=NUM_SLOTS,
        worker_flags=("--single-step", "--max-overlap-depth", "0"),
        scheduler_flags=("--record-steps", "--batching", policy),
    )


async def play(address: str, case: Case) -> Outcome:
    """Plays one case on a fresh or idle stack of its policy."""
    async with lab_session(address) as session:
        num_before = len(await session.steps())
        await session.ask(OPENER, 1)
        a, b, c = case.lengths
        replies = [await session.ask((1,), a), await session.ask((2,), b)]
        if case.late is None:
            replies.append(await session.ask((3,), c))
        for num_ended in range(MAX_FLUSHES):
            # After this many ends the step in flight is round `num_ended`; the next one follows it.
            if case.late is not None and num_ended == case.late - 1:
                replies.append(await session.ask((3,), c))
            if not await session.flush():
                break
        num_tokens = sum([len(await reply.tokens()) for reply in replies])
        steps = (await session.steps())[num_before:]
        return read_rounds(steps[1:], num_tokens)


def read_rounds(steps: Sequence[RecordedStep], num_tokens: int) -> Outcome:
    """Recorded steps to rounds. The slot A was given is the first column."""
    slots: dict[int, None] = {}
    for step in steps:
        for row in sorted(step.rows, key=lambda row: NAMES[row.prompt]):
            slots.setdefault(row.slot)
    rounds: list[str] = []
    finish: dict[str, int] = {}
    for number, step in enumerate(steps, start=1):
        names = {row.slot: NAMES[row.prompt] for row in step.rows}
        rounds.append("".join(names.get(slot, "-") for slot in slots))
        finish |= dict.fromkeys(names.values(), number)
    return Outcome(tuple(rounds), tuple(sorted(finish.items())), num_tokens)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("-v", "--verbose", is_flag=True, help="Show the services' logs on stderr.")
def batch(*, verbose: bool) -> None:
    """Fill two slots with three requests, in fixed batches and with refilling."""
    outcomes = run_experiment(_play_all, verbose=verbose)
    _show(outcomes)
    if not all(golden.outcome == outcome for golden, outcome in outcomes):
        raise StackError("a table differs from the one on paper")


async def _play_all(log_dir: Path | None) -> list[tuple[Golden, Outcome]]:
    outcomes: dict[Case, Outcome] = {}
    for policy in ("fixed", "continuous"):
        cases = [golden.case for golden in GOLDEN if golden.case.policy == policy]

        async def play_cases(address: str, cases: Sequence[Case] = cases) -> list[Outcome]:
            return [await play(address, case) for case in cases]

        outcomes |= zip(cases, await on_stack(options(policy), play_cases, log_dir), strict=True)
    return [(golden, outcomes[golden.case]) for golden in GOLDEN]


def _show(outcomes: Sequence[tuple[Golden, Outcome]]) -> None:
    console = Console(highlight=False)
    console.print("Two slots, three requests; each that holds a slot gains one token a round.\n", style="bold")
    table = Table()
    table.add_column("policy (A B C)", no_wrap=True)
    for name in ("rounds of slots 1, 2", "unused", "last round"):
        table.add_column(name, no_wrap=True)
    for golden, outcome in outcomes:
        table.add_row(
            golden.title,
            f"{len(outcome.rounds)}: {' '.join(outcome.rounds)}",
            str(outcome.num_unused),
            " ".join(f"{name}={last}" for name, last in outcome.finish),
        )
    console.print(table)
    agrees = all(golden.outcome == outcome for golden, outcome in outcomes)
    show_facts(
        console,
        [
            ("A B C", "the tokens they need; late: C arrives at the start of round 4"),
            ("shows", "refilling saves a round where somebody ends early, and nothing elsewhere"),
            ("", "no policy reads how long a request will be; the useful work is the same"),
            ("", "a slot that is empty because nobody waits is no fault of the scheduler"),
            ("on paper", on_paper(agrees=agrees)),
        ],
    )
