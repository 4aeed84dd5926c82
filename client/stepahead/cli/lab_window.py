"""`stepahead lab window`: lose a sliding window, rebuild it, and what goes wrong if one looks at the wrong end.

The toy model's next token is the sum of the last processed tokens modulo 10. The cache is so small that an older
request needs the blocks of this one at a known step: it loses its place with everything it had in the cache, and
is replayed later. The replay is cut so that the processed tokens come first and the newest one alone after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.failures import StackError
from stepahead.cli.lab_session import RecordedRow, lab_session, on_paper, on_stack, run_experiment, show_facts
from stepahead.cli.options import CONTEXT_SETTINGS
from stepahead.cli.stack import StackOptions

OLDER = (0,)
"""The prompt of the older request that takes the blocks."""


@dataclass(frozen=True, slots=True)
class Case:
    """How wide the window is, what the history begins with, and after how many outputs the window is lost."""

    width: int
    prompt: tuple[int, ...]
    num_outputs: int

    @property
    def num_processed(self) -> int:
        """Tokens in the cache at the loss: all but the newest."""
        return len(self.prompt) + self.num_outputs - 1

    @property
    def num_steps(self) -> int:
        """Steps the request takes until the loss, at `num_processed` tokens a step less one for the older."""
        num_chunks = -(-len(self.prompt) // (self.num_processed - 1))
        return num_chunks + self.num_outputs - 1

    @property
    def num_blocks(self) -> int:
        """A cache that is full at the loss: one token a block, the older request is one step ahead."""
        return self.num_processed + self.num_steps + 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was recorded around the loss."""

    width: int
    history: tuple[int, ...]
    """At the loss."""
    num_processed: int
    window_before: tuple[int, ...]
    window_rebuilt: tuple[int, ...]
    wrong_suffix: tuple[int, ...]
    """The end of the history: it holds the newest token, which has not been processed."""
    token_ids: tuple[int, ...]
    """The whole answer; its last token was chosen after the rebuilding."""
    num_preemptions: int

    @property
    def token_from_wrong_suffix(self) -> int:
        """What would follow, had the window been the wrong suffix when the newest token came."""
        return sum((*self.wrong_suffix, self.history[-1])[-self.width :]) % 10


CASES = (Case(3, (1, 2, 3, 5), 4), Case(4, (7, 9), 1), Case(4, (7, 9), 4))
"""The lesson; a window that is not full yet; the same later on."""

GOLDEN = (
    Outcome(3, (1, 2, 3, 5, 0, 8, 3, 1), 7, (0, 8, 3), (0, 8, 3), (8, 3, 1), (0, 8, 3, 1, 2), 1),
    Outcome(4, (7, 9, 6), 2, (7, 9), (7, 9), (7, 9, 6), (6, 2), 1),
    Outcome(4, (7, 9, 6, 2, 4, 1), 5, (9, 6, 2, 4), (9, 6, 2, 4), (6, 2, 4, 1), (6, 2, 4, 1, 3), 1),
)


def options(case: Case) -> StackOptions:
    """A cache that runs out at the wanted step, and steps that end when told."""
    return StackOptions(
        model=f"toy:window-sum?width={case.width}",
        overlap="off",
        block_size=1,
        num_kv_blocks=case.num_blocks,
        max_num_seqs=2,
        max_num_batched_tokens=case.num_processed,
        worker_flags=("--single-step",),
        # The replay must compute what was lost, not find it again.
        scheduler_flags=("--record-steps", "--no-prefix-caching"),
    )


async def play(address: str, case: Case) -> Outcome:
    """Plays one case on a fresh stack of its own.

    Raises:
        StackError: the request did not lose its place exactly once.
    """
    async with lab_session(address) as session:
        # Just long enough to need a block at the loss: its own first step, the other's, and the one that takes it.
        await session.ask(OLDER, case.num_steps + 2)
        reply = await session.ask(case.prompt, case.num_outputs + 1)
        await session.flush_all()
        token_ids = await reply.tokens()
        num_preemptions = (await session.status()).totals.preemptions
        rows = [row for step in await session.steps() for row in step.rows if row.prompt == case.prompt]
    return read_outcome(rows, case.width, token_ids, num_preemptions)


def read_outcome(
    rows: Sequence[RecordedRow], width: int, token_ids: tuple[int, ...], num_preemptions: int
) -> Outcome:
    """The recorded rows of the request to what happened around its loss."""
    stays = list(dict.fromkeys(row.incarnation for row in rows))
    if len(stays) != 2:
        raise StackError(f"the request was admitted {len(stays)} times instead of twice")
    before = [row for row in rows if row.incarnation == stays[0]]
    after = [row for row in rows if row.incarnation == stays[1]]
    num_processed = before[-1].first_position + before[-1].num_fed
    rebuilt = next((row for row in after if row.first_position + row.num_fed == num_processed), None)
    if rebuilt is None:
        raise StackError("the replay did not stop where the loss was")
    history = after[0].history
    return Outcome(
        width=width,
        history=history,
        num_processed=num_processed,
        window_before=before[-1].inputs,
        window_rebuilt=rebuilt.inputs,
        wrong_suffix=history[-width:],
        token_ids=token_ids,
        num_preemptions=num_preemptions,
    )


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("-v", "--verbose", is_flag=True, help="Show the services' logs on stderr.")
def window(*, verbose: bool) -> None:
    """Lose a sliding window to another request and rebuild it from what was processed."""
    outcomes = run_experiment(_play_all, verbose=verbose)
    _show(outcomes)
    if tuple(outcomes) != GOLDEN:
        raise StackError("a window differs from the one on paper")


async def _play_all(log_dir: Path | None) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for case in CASES:

        async def play_case(address: str, case: Case = case) -> Outcome:
            return await play(address, case)

        outcomes.append(await on_stack(options(case), play_case, log_dir))
    return outcomes


def _show(outcomes: Sequence[Outcome]) -> None:
    console = Console(highlight=False)
    console.print("Next token = sum of the last processed tokens modulo 10.\n", style="bold")
    table = Table()
    table.add_column("", no_wrap=True)
    for case in CASES:
        table.add_column(f"width {case.width}, lost\nafter output {case.num_outputs}", no_wrap=True)
    columns = [_facts(outcome) for outcome in outcomes]
    for name in columns[0]:
        table.add_row(name, *[facts[name] for facts in columns])
    console.print(table)
    show_facts(
        console,
        [
            ("shows", "what is rebuilt is what was processed, not what was emitted (rules A1, G3)"),
            ("", "the newest token, though in the history, enters the window with the next step only"),
            ("on paper", on_paper(agrees=tuple(outcomes) == GOLDEN)),
        ],
    )


def _facts(outcome: Outcome) -> dict[str, str]:
    return {
        "history at the loss": _list(outcome.history),
        "processed": f"{outcome.num_processed} of {len(outcome.history)}",
        "window before": _list(outcome.window_before),
        "window rebuilt": _list(outcome.window_rebuilt),
        "end of history": _list(outcome.wrong_suffix),
        "next token": str(outcome.token_ids[-1]),
        "token from that end": str(outcome.token_from_wrong_suffix),
    }


def _list(values: Sequence[int]) -> str:
    return " ".join(map(str, values))
