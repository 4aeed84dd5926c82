"""The requests of a file, several at once; answers and failures come in the order of the lines."""

import asyncio
import json
from collections.abc import Sequence

import click

from stepahead.cli.connection_notes import ConnectionNotes
from stepahead.cli.failures import describe, exit_code_of
from stepahead.cli.prompt_tokens import with_prompt_tokens_async
from stepahead.cli.rendering import (
    Json,
    answer_lines,
    approximate_lines,
    completion_object,
    error_object,
    prompt_logprob_lines,
)
from stepahead.cli.request_file import FileRequest
from stepahead.client import AsyncClient, Completion, StepaheadError


async def generate_all(address: str, requests: Sequence[FileRequest], concurrency: int, *, as_json: bool) -> int:
    """Runs all requests and prints what becomes of each; returns the exit code of the first that failed."""
    slots = asyncio.Semaphore(concurrency)
    async with AsyncClient(address, on_connection_change=ConnectionNotes(address)) as client:

        async def run(request: FileRequest) -> Completion | StepaheadError:
            async with slots:
                try:
                    completion = await client.generate(request.request)
                    return await with_prompt_tokens_async(client, request.request.prompt, completion)
                except StepaheadError as error:
                    return error

        tasks = [asyncio.create_task(run(each)) for each in requests]
        exit_code = 0
        try:
            for request, task in zip(requests, tasks, strict=True):
                outcome = await task
                if isinstance(outcome, StepaheadError):
                    exit_code = exit_code or exit_code_of(outcome)
                    click.echo(describe(outcome, place=request.place), err=True)
                if as_json:
                    click.echo(json.dumps(_object(request, outcome)))
                elif isinstance(outcome, Completion):
                    await _print_answer(client, request, outcome)
        finally:
            # Whatever ends this early, be it a full disk, ends the requests on the server too.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return exit_code


def _object(request: FileRequest, outcome: Completion | StepaheadError) -> dict[str, Json]:
    rendered = (
        completion_object(outcome)
        if isinstance(outcome, Completion)
        else error_object(request.request.request_id, outcome)
    )
    return {"line": request.line, **rendered}


async def _print_answer(client: AsyncClient, request: FileRequest, completion: Completion) -> None:
    has_text = any(choice.text for choice in completion.choices)
    shows_ids = not has_text and not (await client.get_model()).has_tokenizer
    for line in answer_lines(completion, shows_ids=shows_ids, place=f"line {request.line}, "):
        click.echo(line)
    for line in prompt_logprob_lines(completion):
        click.echo(line)
    for line in approximate_lines(completion, place=f"line {request.line}, "):
        click.echo(line, err=True)
