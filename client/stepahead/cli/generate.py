"""`stepahead generate`: one request, or a file of them."""

import json
import sys
from pathlib import Path
from typing import Unpack

import click
from click.core import ParameterSource
from rich.console import Console

from stepahead.cli.connection_notes import ConnectionNotes
from stepahead.cli.generate_file import generate_all
from stepahead.cli.interrupting import cancelled_by_signals, run_until_signal
from stepahead.cli.options import (
    CONTEXT_SETTINGS,
    TokenIds,
    address_option,
    generation_options,
    json_option,
)
from stepahead.cli.prompt_tokens import with_prompt_tokens
from stepahead.cli.rendering import (
    answer_lines,
    approximate_lines,
    completion_object,
    decode_rate,
    prompt_logprob_lines,
)
from stepahead.cli.request_file import read_requests
from stepahead.client import ChatMessage, Client, Completion, GenerateOptions, Prompt, StepaheadError


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
    if as_chat and prompt is None:
        raise click.UsageError("--chat goes with PROMPT; a line of --input holds messages itself")
    if input_path is None and _is_typed("concurrency"):
        raise click.UsageError("--concurrency goes with --input")
    if _is_typed("request_id") and not options.get("request_id"):
        raise click.BadParameter("is empty; leave it out for one that is made up", param_hint="'--request-id'")
    if input_path is not None:
        if options.get("request_id"):
            raise click.UsageError("--request-id names one request; a line of --input has its own request_id")
        requests = read_requests(input_path, options)
        raise SystemExit(run_until_signal(generate_all(address, requests, concurrency, as_json=as_json)))
    request = _prompt(prompt, prompt_ids, as_chat=as_chat)
    with Client(address, on_connection_change=ConnectionNotes(address)) as client:
        if as_json:
            _print_object(client, request, options)
        else:
            _print_stream(client, request, options)


def _is_typed(name: str) -> bool:
    """Whether an option stands on the command line; the environment may hold what is for other commands."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _prompt(prompt: str | None, prompt_ids: tuple[int, ...] | None, *, as_chat: bool) -> Prompt:
    if prompt is None:
        return prompt_ids or ()
    # The newline that ends a piped line is the shell's, not the prompt's.
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if as_chat and not text.strip():
        raise click.UsageError("PROMPT is empty: a chat message says something")
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
    lines = answer_lines(completion, shows_ids=shows_ids)
    # One answer's text is there already, but for the end of its line.
    for line in lines if several or shows_ids else ["", *lines[1:]]:
        click.echo(line)
    for line in prompt_logprob_lines(with_prompt_tokens(client, prompt, completion)):
        click.echo(line)
    for line in approximate_lines(completion):
        click.echo(line, err=True)
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
