"""`stepahead lab generate`: how a loop of "score, pick, append" ends.

The toy model is a table: for each last word, a score for each next word. The request takes the whole way
that any request takes: client, scheduler, worker and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from stepahead.cli.failures import StackError
from stepahead.cli.lab_session import on_paper, on_stack, run_experiment, show_facts
from stepahead.cli.options import CONTEXT_SETTINGS
from stepahead.cli.stack import StackOptions
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
    outcomes = run_experiment(_run_cases, verbose=verbose)
    _show(outcomes)
    if not all(case.agrees_with(completion) for case, completion in outcomes):
        raise StackError("an answer differs from the table's")


async def _run_cases(log_dir: Path | None) -> list[tuple[Case, Completion]]:
    outcomes: list[tuple[Case, Completion]] = []
    for model in dict.fromkeys(case.model for case in CASES):
        cases = [case for case in CASES if case.model == model]

        async def ask(address: str, cases: Sequence[Case] = cases) -> list[Completion]:
            async with AsyncClient(address) as client:
                return [await client.generate([0], max_tokens=case.limit, temperature=0.0) for case in cases]

        completions = await on_stack(StackOptions(model=model), ask, log_dir)
        outcomes += zip(cases, completions, strict=True)
    return outcomes


def _show(outcomes: Sequence[tuple[Case, Completion]]) -> None:
    console = Console(highlight=False)
    console.print("Prompt <start>; each step takes the word with the highest score.\n", style="bold")
    for case, completion in outcomes:
        words = " > ".join(WORDS[token_id] for token_id in (0, *completion.token_ids))
        stopped = completion.finish_reason is FinishReason.STOP
        show_facts(
            console,
            [
                ("limit", f"{case.limit} tokens"),
                ("words", words),
                ("text", completion.text),
                ("ended by", "the end token" if stopped else f"the {completion.finish_reason.value} limit"),
                ("shows", case.rule),
                ("on paper", on_paper(agrees=case.agrees_with(completion))),
            ],
        )
        console.print()
