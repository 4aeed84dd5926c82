"""`stepahead demo`: start everything, answer one question, show the figures, stop. Behind `make demo`."""

import asyncio
from pathlib import Path
from typing import Unpack

import click
from rich.console import Console

from stepahead.cli.local_services import passing_log_dir, require_extras
from stepahead.cli.options import CONTEXT_SETTINGS, StackArguments, stack_options
from stepahead.cli.rendering import decode_rate
from stepahead.cli.stack import Stack, StackOptions, StackReady, run_stack
from stepahead.cli.stack_view import ConsoleView, show_banner
from stepahead.client import AsyncClient, ChatMessage, Completion, ServerStatus


@click.command(context_settings=CONTEXT_SETTINGS, hidden=True)
@stack_options()
@click.option("--prompt", default="What is the capital of France, and what is it known for?")
@click.option("--max-tokens", type=int, default=64)
@click.option("-v", "--verbose", is_flag=True, help="Show the services' logs on stderr.")
def demo(prompt: str, max_tokens: int, *, verbose: bool, **arguments: Unpack[StackArguments]) -> None:
    """Start a stack, stream one answer, show its figures and stop."""
    require_extras("scheduler", "worker")
    options = StackOptions(**arguments)
    with passing_log_dir(verbose=verbose) as log_dir:
        asyncio.run(_demonstrate(options, prompt, max_tokens, log_dir))


async def _demonstrate(options: StackOptions, prompt: str, max_tokens: int, log_dir: Path | None) -> None:
    with ConsoleView(Console(stderr=True)) as view:

        async def ask(ready: StackReady) -> None:
            view.serving()
            show_banner(ready, options, log_dir)
            async with AsyncClient(ready.address) as client:
                completion = await _answer(client, prompt, max_tokens)
                _show_figures(completion, await client.status())

        await run_stack(Stack(options, view, log_dir=log_dir), ask)


async def _answer(client: AsyncClient, prompt: str, max_tokens: int) -> Completion:
    model = await client.get_model()
    # Models without a chat template, the toys among them, continue the plain text.
    asked = [ChatMessage("user", prompt)] if model.has_chat_template else prompt
    click.echo(f"\n> {prompt}\n")
    async with client.stream(asked, max_tokens=max_tokens, temperature=0.0) as stream:
        async for delta in stream:
            click.echo(delta.text, nl=False)
        click.echo("\n")
        return await stream.completion()


def _show_figures(completion: Completion, status: ServerStatus) -> None:
    rate = decode_rate(completion)
    num_boundaries = sum(worker.steps.boundaries for worker in status.workers)
    num_overlapped = sum(worker.steps.boundaries_with_running_step for worker in status.workers)
    share = f"{num_overlapped / num_boundaries:.1%}" if num_boundaries else "none yet"
    click.echo(f"tokens              {completion.usage.output_tokens} ({completion.finish_reason.value})")
    click.echo(f"tokens per second   {'-' if rate is None else f'{rate:.1f}'}")
    click.echo(f"time to first token {completion.timings.first_token_ns / 1e6:.0f} ms")
    click.echo(f"boundaries with a running step: {share} of {num_boundaries}")
