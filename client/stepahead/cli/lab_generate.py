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
        "the end token ends it, although five more tokens were allowed",
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
    Console().print(_outcome_table(outcomes))
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


def _outcome_table(outcomes: Sequence[tuple[Case, Completion]]) -> Table:
    table = Table(title="prompt <start>, always the word with the highest score", show_lines=True)
    table.add_column("limit", justify="right")
    for name in ("the words, one per step", "text", "ended by", "what it shows"):
        table.add_column(name, overflow="fold")
    table.add_column("as on paper")
    for case, completion in outcomes:
        table.add_row(
            str(case.limit),
            " > ".join(WORDS[token_id] for token_id in (0, *completion.token_ids)),
            completion.text,
            "end token" if completion.finish_reason is FinishReason.STOP else completion.finish_reason.value,
            case.rule,
            "yes" if case.agrees_with(completion) else "NO",
        )
    return table
