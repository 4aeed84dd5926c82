"""`stepahead lab generate`: how a loop of "score, pick, append" ends.

The toy model is a table: for each last word, a score for each next word. The request takes the whole way
that any request takes: client, scheduler, worker and back.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepahead.cli.failures import EXIT_FAILURE
from stepahead.cli.local_services import passing_log_dir, require_extras
from stepahead.cli.options import CONTEXT_SETTINGS
from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView
from stepahead.client import AsyncClient, Completion, FinishReason

WORDS = ("<start>", "Small", "steps", "help", "<end>")
_TABLE_MODEL = "toy:score-table"
_LOOP_MODEL = "toy:score-table?loop=steps"


@dataclass(frozen=True, slots=True)
class Case:
    """One run: what is asked, what must come, and the rule it shows."""

    model: str
    limit: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    rule: str

    def agrees_with(self, completion: Completion) -> bool:
        """Whether the answer is the one that the table gives on paper."""
        return (completion.token_ids, completion.text, completion.finish_reason) == (
            self.token_ids,
            self.text,
            self.finish_reason,
        )


CASES = (
    Case(
        _TABLE_MODEL,
        8,
        (1, 2, 3, 4),
        "Small steps help",
        FinishReason.STOP,
        "the end token ends it, although four more tokens were allowed",
    ),
    Case(
        _TABLE_MODEL,
        2,
        (1, 2),
        "Small steps",
        FinishReason.LENGTH,
        "the limit ends it, although the sentence was not done",
    ),
    Case(
        _LOOP_MODEL,
        8,
        (1, *[2] * 7),
        "Small" + " steps" * 7,
        FinishReason.LENGTH,
        "a model that never picks the end token is ended by the limit alone",
    ),
)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("-v", "--verbose", is_flag=True, help="Show the services' logs on stderr.")
def generate(*, verbose: bool) -> None:
    """Generate greedily from a score table: what ends a generation?"""
    require_extras("scheduler", "worker")
    with passing_log_dir(verbose=verbose) as log_dir:
        outcomes = asyncio.run(_run_cases(log_dir))
    _show(outcomes)
    if not all(case.agrees_with(completion) for case, completion in outcomes):
        click.echo("error: an answer differs from the table's", err=True)
        raise SystemExit(EXIT_FAILURE)


async def _run_cases(log_dir: Path | None) -> list[tuple[Case, Completion]]:
    outcomes: list[tuple[Case, Completion]] = []
    for model in dict.fromkeys(case.model for case in CASES):
        cases = [case for case in CASES if case.model == model]

        async def ask(ready: StackReady, cases: Sequence[Case] = cases) -> list[Completion]:
            async with AsyncClient(ready.address) as client:
                return [await client.generate([0], max_tokens=case.limit, temperature=0.0) for case in cases]

        with ConsoleView(Console(stderr=True, quiet=True)) as view:
            completions = await run_stack(Stack(StackOptions(model=model), view, log_dir=log_dir), ask)
        outcomes += zip(cases, completions, strict=True)
    return outcomes


def _show(outcomes: Sequence[tuple[Case, Completion]]) -> None:
    console = Console(highlight=False)
    console.print("Prompt <start>; each step takes the word with the highest score.\n", style="bold")
    for case, completion in outcomes:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim")
        rows.add_column(overflow="fold")
        words = " > ".join(WORDS[token_id] for token_id in (0, *completion.token_ids))
        stopped = completion.finish_reason is FinishReason.STOP
        rows.add_row("limit", f"{case.limit} tokens")
        rows.add_row("words", Text(words))
        rows.add_row("text", Text(completion.text, style="bold"))
        rows.add_row("ended by", "the end token" if stopped else f"the {completion.finish_reason.value} limit")
        rows.add_row("shows", case.rule)
        rows.add_row("on paper", "the same" if case.agrees_with(completion) else "SOMETHING ELSE")
        console.print(rows)
        console.print()
