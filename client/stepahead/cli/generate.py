"""`stepahead generate`: one request, or a file of them."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Unpack

import click
from rich.console import Console

from stepahead.cli.failures import describe, exit_code_of
from stepahead.cli.interrupting import cancelled_by_signals
from stepahead.cli.options import (
    CONTEXT_SETTINGS,
    TokenIds,
    address_option,
    generation_options,
    json_option,
)
from stepahead.cli.prompt_tokens import with_prompt_tokens, with_prompt_tokens_async
from stepahead.cli.rendering import (
    Json,
    completion_object,
    decode_rate,
    error_object,
    logprob_lines,
    prompt_logprob_lines,
)
from stepahead.cli.request_file import read_requests
from stepahead.client import (
    AsyncClient,
    ChatMessage,
    Client,
    Completion,
    GenerateOptions,
    GenerationRequest,
    Prompt,
    StepaheadError,
)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("prompt", required=False)
@address_option
@click.option(
    "--token-ids", "prompt_ids", type=TokenIds(), envvar="STEPAHEAD_TOKEN_IDS", help="Prompt as token ids: 1,2,3."
)
@click.option(
    "--chat", "as_chat", is_flag=True, envvar="STEPAHEAD_CHAT", help="Send the prompt as a user's chat message."
)
@click.option("--num-choices", type=int, help="Independent answers.")
@click.option("--request-id", default="", help="Id of the request, for status and cancellation.")
@click.option(
    "--served-model",
    "model",
    default="",
    envvar="STEPAHEAD_SERVED_MODEL",
    # STEPAHEAD_MODEL is what `up` loads, which is no name to ask for.
    allow_from_autoenv=False,
    help="Name of the model.",
)
@click.option(
    "--input",
    "input_path",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    envvar="STEPAHEAD_INPUT",
    help='File of requests, one JSON object a line: {"prompt": TEXT or IDS or MESSAGES, options...}.',
)
@click.option("--concurrency", type=click.IntRange(1), default=8, help="Requests of --input at once.")
@json_option("Print one JSON object per request.")
@generation_options
def generate(
    prompt: str | None,
    address: str,
    prompt_ids: tuple[int, ...] | None,
    input_path: Path | None,
    concurrency: int,
    *,
    as_chat: bool,
    as_json: bool,
    **options: Unpack[GenerateOptions],
) -> None:
    """Generate from PROMPT ("-" reads it from stdin) and print the answer as it is made."""
    given = [each for each in (prompt, prompt_ids, input_path) if each is not None]
    if len(given) != 1:
        raise click.UsageError("give exactly one of PROMPT, --token-ids and --input")
    if input_path is not None:
        requests = read_requests(input_path, options)
        raise SystemExit(asyncio.run(_generate_all(address, requests, concurrency, as_json=as_json)))
    request = _prompt(prompt, prompt_ids, as_chat=as_chat)
    with Client(address) as client:
        if as_json:
            _print_object(client, request, options)
        else:
            _print_stream(client, request, options)


def _prompt(prompt: str | None, prompt_ids: tuple[int, ...] | None, *, as_chat: bool) -> Prompt:
    if prompt is None:
        return prompt_ids or ()
    # The newline that ends a piped line is the shell's, not the prompt's.
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    return [ChatMessage("user", text)] if as_chat else text


def _print_object(client: Client, prompt: Prompt, options: GenerateOptions) -> None:
    with cancelled_by_signals(client.stream(prompt, **options)) as stream:
        completion = stream.completion()
    try:
        completion = with_prompt_tokens(client, prompt, completion)
    finally:
        # An answer that has come is printed whatever fails after it.
        click.echo(json.dumps(completion_object(completion)))


def _print_stream(client: Client, prompt: Prompt, options: GenerateOptions) -> None:
    several = (options.get("num_choices") or 1) > 1
    with cancelled_by_signals(client.stream(prompt, **options)) as stream:
        try:
            for delta in stream:
                # Several choices speak in turns: mixed, nobody could read them.
                if not several:
                    click.echo(delta.text, nl=False)
        except StepaheadError:
            # The message about it begins a line of its own.
            if stream.text and not several:
                click.echo()
            raise
        completion = stream.completion()
    shows_ids = not any(choice.text for choice in completion.choices) and not client.get_model().has_tokenizer
    for choice in completion.choices:
        if several:
            click.echo(f"--- choice {choice.index} ({choice.finish_reason.value})\n{choice.text}", nl=False)
        click.echo(",".join(map(str, choice.token_ids)) if shows_ids else "")
        for line in logprob_lines(choice.logprobs):
            click.echo(line)
    for line in prompt_logprob_lines(with_prompt_tokens(client, prompt, completion)):
        click.echo(line)
    if sys.stdout.isatty():
        show_statistics(completion)


def show_statistics(completion: Completion) -> None:
    """One dim line on stderr: why it ended, how long it took."""
    rate = decode_rate(completion)
    parts = [
        completion.finish_reason.value,
        f"{completion.usage.output_tokens} tokens",
        f"first after {completion.timings.first_token_ns / 1e6:.0f} ms",
    ]
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    Console(stderr=True).print(", ".join(parts), style="dim", highlight=False)


async def _generate_all(address: str, requests: list[GenerationRequest], concurrency: int, *, as_json: bool) -> int:
    """Runs all requests and prints them in the order of the file; returns the exit code of the first failure."""
    slots = asyncio.Semaphore(concurrency)
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:

        async def run(request: GenerationRequest) -> Completion | StepaheadError:
            async with slots:
                try:
                    completion = await client.generate(request)
                    return await with_prompt_tokens_async(client, request.prompt, completion)
                except StepaheadError as error:
                    return error

        exit_code = 0
        for request, task in [(each, group.create_task(run(each))) for each in requests]:
            outcome = await task
            if isinstance(outcome, StepaheadError):
                exit_code = exit_code or exit_code_of(outcome)
                click.echo(describe(outcome), err=True)
            if as_json:
                click.echo(json.dumps(_outcome_object(request, outcome)))
            elif isinstance(outcome, Completion):
                for choice in outcome.choices:
                    click.echo(choice.text)
    return exit_code


def _outcome_object(request: GenerationRequest, outcome: Completion | StepaheadError) -> dict[str, Json]:
    if isinstance(outcome, Completion):
        return completion_object(outcome)
    return error_object(request.request_id, outcome)
