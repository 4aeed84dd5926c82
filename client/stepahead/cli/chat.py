"""`stepahead chat`: a conversation in the terminal."""

import sys
from typing import Unpack

import click

from stepahead.cli.connection_notes import ConnectionNotes
from stepahead.cli.failures import describe
from stepahead.cli.generate import show_statistics
from stepahead.cli.interrupting import cancelled_by_signals
from stepahead.cli.options import CONTEXT_SETTINGS, address_option, generation_options
from stepahead.cli.prompt_tokens import with_prompt_tokens
from stepahead.cli.rendering import logprob_lines, prompt_logprob_lines
from stepahead.client import ChatMessage, Client, GenerateOptions, StepaheadError, UnavailableError

_HELP = "/exit leaves, /reset forgets the conversation, Ctrl-C stops an answer"


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("message", required=False)
@address_option
@click.option("--system", help="Instruction before the conversation.")
@generation_options
def chat(message: str | None, address: str, system: str | None, **options: Unpack[GenerateOptions]) -> None:
    """Talk to the model: MESSAGE for one answer, nothing for a conversation."""
    if message is not None and not message.strip():
        raise click.UsageError("MESSAGE is empty; leave it out for a conversation")
    with Client(address, on_connection_change=ConnectionNotes(address)) as client:
        conversation = Conversation(client, system, options)
        if message is not None:
            conversation.answer(message)
            return
        # Fails here, with a hint, rather than after the first message was typed.
        model = client.get_model().model
        click.echo(f"{model}: {_HELP}", err=True)
        _converse(conversation)


class Conversation:
    """The turns so far; only answered ones stay."""

    def __init__(self, client: Client, system: str | None, options: GenerateOptions) -> None:
        self._client = client
        self._options = options
        self._opening = () if system is None else (ChatMessage("system", system),)
        self.turns: tuple[ChatMessage, ...] = self._opening

    def reset(self) -> None:
        """Forgets everything but the instruction."""
        self.turns = self._opening

    def answer(self, message: str) -> None:
        """Prints the answer as it is made. Raises StepaheadError.

        Ctrl-C cancels it, keeps what has come and raises KeyboardInterrupt.
        """
        asked = (*self.turns, ChatMessage("user", message))
        text = ""
        try:
            with cancelled_by_signals(self._client.stream(asked, **self._options)) as stream:
                try:
                    for delta in stream:
                        click.echo(delta.text, nl=False)
                    completion = stream.completion()
                finally:
                    text = stream.text
                    # What comes next, an error say, begins a line of its own.
                    if text:
                        click.echo()
        except KeyboardInterrupt:
            if text:
                self.turns = (*asked, ChatMessage("assistant", text))
            raise
        self.turns = (*asked, ChatMessage("assistant", completion.text))
        if not text:
            click.echo(f"(no text: {completion.finish_reason.value})", err=True)
        for line in logprob_lines(completion.choices[0].logprobs):
            click.echo(line)
        for line in prompt_logprob_lines(with_prompt_tokens(self._client, asked, completion)):
            click.echo(line)
        if sys.stdout.isatty():
            show_statistics(completion)


def _converse(conversation: Conversation) -> None:
    _enable_line_editing()
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo(f"\n{_HELP}", err=True)
            continue
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            click.echo(_HELP, err=True)
        elif line:
            _answer_or_report(conversation, line)


def _answer_or_report(conversation: Conversation, line: str) -> None:
    try:
        conversation.answer(line)
    except KeyboardInterrupt:
        click.echo("(stopped)", err=True)
    except UnavailableError:
        # Nothing that is typed next could succeed.
        raise
    except StepaheadError as error:
        click.echo(describe(error), err=True)


def _enable_line_editing() -> None:
    """Arrow keys and history in `input`, where the platform has them."""
    try:
        import readline  # noqa: PLC0415 - importing it is what enables it, and only a conversation wants that
    except ImportError:
        return
    readline.set_history_length(1000)
