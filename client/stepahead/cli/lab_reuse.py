"""`stepahead lab reuse`: what a cache saves, counted in additions.

The toy model's next token is the sum of the whole history modulo 10. With reuse its cache holds running sums, so a
step adds only the tokens it feeds; without, every step adds up the history again. The worker counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from stepahead.cli.failures import StackError
from stepahead.cli.lab_session import RecordedStep, lab_session, on_paper, on_stack, run_experiment, show_facts
from stepahead.cli.options import CONTEXT_SETTINGS, TokenIds
from stepahead.cli.stack import StackOptions

MODELS = {"recomputing": "toy:running-sum?reuse=off", "reusing": "toy:running-sum"}
PROMPT = (1, 2, 3, 5)
NUM_OUTPUTS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of getting the tokens."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    steps: tuple[RecordedStep, ...]

    @property
    def num_additions(self) -> int:
        """Over all steps, as the worker counted them."""
        return sum(row.num_additions for step in self.steps for row in step.rows)

    @property
    def num_history(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def num_cached(self) -> int:
        """Tokens the model has processed."""
        return sum(row.num_fed for step in self.steps for row in step.rows)


def options(way: str) -> StackOptions:
    """The stack of one way. Without overlap, because counting needs no second step in flight."""
    return StackOptions(model=MODELS[way], overlap="off", scheduler_flags=("--record-steps",))


def additions_on_paper(way: str, num_prompt: int, num_outputs: int) -> int:
    """Additions for a prompt of n and m outputs: n + m - 1 with reuse, m n + m (m - 1) / 2 without."""
    if way == "reusing":
        return num_prompt + num_outputs - 1
    return num_outputs * num_prompt + num_outputs * (num_outputs - 1) // 2


async def play(address: str, prompt: Sequence[int], num_outputs: int) -> Outcome:
    """Generates once and reads what the worker recorded."""
    async with lab_session(address) as session:
        num_before = len(await session.steps())
        token_ids = await (await session.ask(prompt, num_outputs)).tokens()
        return Outcome(tuple(prompt), token_ids, tuple((await session.steps())[num_before:]))


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--prompt", type=TokenIds(), default=PROMPT, help="Digits that the history begins with.")
@click.option("--outputs", type=click.IntRange(1, 100), default=NUM_OUTPUTS, help="Tokens to generate.")
@click.option("-v", "--verbose", is_flag=True, help="Show the services' logs on stderr.")
def reuse(prompt: tuple[int, ...], outputs: int, *, verbose: bool) -> None:
    """Count additions with and without a cache."""
    if not prompt or not all(0 <= token < 10 for token in prompt):
        raise click.BadParameter("must be digits, at least one", param_hint="--prompt")
    outcomes = run_experiment(lambda log_dir: _play_all(prompt, outputs, log_dir), verbose=verbose)
    _show(outcomes)
    if not _agrees(outcomes):
        raise StackError("the counts differ from those on paper")


async def _play_all(prompt: tuple[int, ...], num_outputs: int, log_dir: Path | None) -> dict[str, Outcome]:
    return {
        way: await on_stack(options(way), lambda address: play(address, prompt, num_outputs), log_dir)
        for way in MODELS
    }


def _agrees(outcomes: dict[str, Outcome]) -> bool:
    return len({outcome.token_ids for outcome in outcomes.values()}) == 1 and all(
        outcome.num_additions == additions_on_paper(way, len(outcome.prompt), len(outcome.token_ids))
        and outcome.num_cached == outcome.num_history - 1
        for way, outcome in outcomes.items()
    )


def _show(outcomes: dict[str, Outcome]) -> None:
    console = Console(highlight=False)
    recomputing, reusing = outcomes["recomputing"], outcomes["reusing"]
    console.print("Next token = sum of the history modulo 10; each step as the worker ran it.\n", style="bold")
    table = Table()
    for name in ("step", "tokens fed", "next token", "additions, recomputing", "additions, reusing"):
        table.add_column(name, justify="right")
    for without, with_reuse in zip(recomputing.steps, reusing.steps, strict=True):
        (row,), (other,) = with_reuse.rows, without.rows
        table.add_row(
            str(with_reuse.step_id),
            str(row.num_fed),
            str(row.token_id),
            str(other.num_additions),
            str(row.num_additions),
        )
    table.add_section()
    table.add_row("all", "", "", str(recomputing.num_additions), str(reusing.num_additions))
    console.print(table)
    answer = " ".join(map(str, reusing.prompt)) + " > " + " ".join(map(str, reusing.token_ids))
    show_facts(
        console,
        [
            ("tokens", answer),
            ("history, cache", f"{reusing.num_history} entries, {reusing.num_cached} processed"),
            ("shows", "with a cache a step costs what it feeds, not what came before"),
            ("", "the token emitted last has not been processed: history = cache + 1 (rule A1)"),
            ("on paper", on_paper(agrees=_agrees(outcomes))),
        ],
    )
