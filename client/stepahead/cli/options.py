"""Options that several commands share.

Every command uses CONTEXT_SETTINGS, which makes each option an environment variable too: --max-tokens is
STEPAHEAD_MAX_TOKENS. An option that would read the wrong variable that way names its own.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click
from typing_extensions import override

from stepahead.client import DEFAULT_ADDRESS

CONTEXT_SETTINGS: dict[str, object] = {
    "auto_envvar_prefix": "STEPAHEAD",
    "show_default": True,
    "help_option_names": ["-h", "--help"],
}

# What a field of the protocol and the compiled step can hold.
_MOST = 2**31 - 1
_COUNT = click.IntRange(1, _MOST)

_Callback = TypeVar("_Callback", bound=Callable[..., object])


class ServerAddress(click.ParamType[str]):
    """HOST:PORT of a scheduler; also what gRPC calls a name with a scheme (`unix:PATH`, `dns:///HOST:PORT`)."""

    name = "HOST:PORT"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuses what gRPC would dial all the same: it cuts a port to 16 bits."""
        text = str(value)
        host, _, port = text.rpartition(":")
        has_scheme = text.startswith("unix:") or "://" in text or ":///" in text
        if not has_scheme and not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
            self.fail(f"{text!r} is not HOST:PORT with a port in 1..65535", param, ctx)
        return text


class TokenIds(click.ParamType[tuple[int, ...]]):
    """Token ids separated by commas."""

    name = "ID,ID,..."

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parses the option's text; a default that is parsed already stays."""
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]
        parts = [part.strip() for part in str(value).split(",")]
        if not all(_is_number(part) for part in parts):
            self.fail(f"{value!r} is no list of token ids such as 1,2,3", param, ctx)
        return tuple(map(int, parts))


def _is_number(text: str) -> bool:
    """Whether it is digits and nothing else: Python's own numbers may hold signs and underscores."""
    return text.isascii() and text.isdigit()


class LineText(click.types.StringParamType):
    """One of several texts, which may hold blanks: an environment variable has one per line."""

    envvar_list_splitter = "\n"


class TokenBias(click.ParamType[tuple[int, float]]):
    """A token id and its bias."""

    name = "ID=BIAS"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """Parses the option's text."""
        token_id, _, bias = str(value).partition("=")
        try:
            number = float(bias)
        except ValueError:
            number = None
        if number is None or not _is_number(token_id.strip()):
            self.fail(f"{value!r} is no bias of a token such as 7=-2.5", param, ctx)
        return int(token_id), number


class TextOrFile(click.ParamType[str]):
    """A text, or @ and the name of the file that holds it."""

    name = "TEXT|@FILE"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Reads the file, if one is named."""
        text = str(value)
        if not text.startswith("@"):
            return text
        try:
            return Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"cannot read {text[1:]!r}: {error}", param, ctx)


class Seconds(click.FloatRange):
    """A number of seconds, at most a day. NaN compares with nothing, so that a range alone lets it through."""

    def __init__(self, least: float = 0.0, most: float = 86_400.0) -> None:
        super().__init__(least, most)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parses the option's text."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail("nan is no number of seconds", param, ctx)
        return seconds


class Size(click.ParamType[str]):
    """A number of bytes, as the worker reads it; the text is passed on."""

    name = "SIZE"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the option's text."""
        text = str(value)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:[kKMGT]i?B|B)?\s*", text, re.ASCII)
        if match is None:
            self.fail(f"{text!r} is not a size; write for example 2GiB, 500MB or a number of bytes", param, ctx)
        if float(match[1]) == 0:
            self.fail("must be at least 1 byte", param, ctx)
        return text


class Overlap(click.ParamType[str]):
    """How many steps are planned ahead, as the scheduler reads it."""

    name = "on|off|DEPTH"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the option's text."""
        text = str(value)
        if not re.fullmatch("on|off|[0-8]", text):
            self.fail(f"{text!r} is not on, off or a depth from 0 to 8", param, ctx)
        return text


class ListenAddress(click.ParamType[str]):
    """HOST:PORT, a host with colons in brackets, or unix:PATH."""

    name = "HOST:PORT"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the option's text; whether the host exists and the port is free shows later."""
        text = str(value)
        if re.fullmatch("unix:.+", text):
            return text
        match = re.fullmatch(r"(\[[^\[\]]+\]|[^:\s]+):([0-9]{1,5})", text)
        if match is None:
            self.fail(f"{text!r} is not HOST:PORT", param, ctx)
        if int(match[2]) >= 2**16:
            self.fail(f"{text!r}: port {match[2]} is over 65535", param, ctx)
        return text


class ModelName(click.ParamType[str]):
    """What the worker loads; the text is passed on."""

    name = "DIR|FILE.gguf|HUB_ID|toy:NAME"

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuses a path to nothing; what a folder holds and what a name means is the worker's to say."""
        text = str(value)
        is_path = text.endswith(".gguf") or text.startswith(("/", "./", "../", "~"))
        if not text or (is_path and not Path(text).expanduser().exists()):
            self.fail(f"{text!r} does not exist", param, ctx)
        return text


class StackArguments(TypedDict):
    """The values of `stack_options`, for StackOptions."""

    model: str
    workers: int
    overlap: str | None
    dtype: str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    block_size: int | None
    num_kv_blocks: int | None
    kv_cache_bytes: str | None
    tensor_parallel_size: int | None
    threads: int | None
    log_format: str | None
    drain_timeout: float


def address_option(command: _Callback) -> _Callback:
    """--address: where the scheduler listens."""
    return click.option(
        "--address", type=ServerAddress(), default=DEFAULT_ADDRESS, help="Where the scheduler listens."
    )(command)


def json_option(help_text: str) -> Callable[[_Callback], _Callback]:
    """--json, with its own variable because the parameter has another name."""
    return click.option("--json", "as_json", is_flag=True, envvar="STEPAHEAD_JSON", help=help_text)


def generation_options(command: _Callback) -> _Callback:
    """The options of a generation; unset ones are left to the model's defaults. Values as in GenerateOptions."""
    return _apply(command, [*_stopping_options(), *_sampling_options(), *_output_options(), *_scheduling_options()])


def _stopping_options() -> list[Callable[[Any], Any]]:
    return [
        click.option("--max-tokens", type=int, help="Most tokens to generate."),
        click.option("--min-tokens", type=int, help="Fewest tokens before a stop counts."),
        click.option(
            "--stop",
            multiple=True,
            type=LineText(),
            help="Text that ends the answer; may be repeated (in the environment: one per line).",
        ),
        click.option("--stop-token-ids", type=TokenIds(), default=(), help="Token ids that end the answer."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's own end."),
        click.option(
            "--include-stop-in-output", is_flag=True, default=None, help="Keep the stop text in the answer."
        ),
    ]


def _sampling_options() -> list[Callable[[Any], Any]]:
    return [
        click.option("--temperature", type=float, help="0 always takes the likeliest token."),
        click.option("--top-p", type=float, help="Keep the likeliest tokens of this total probability."),
        click.option("--top-k", type=int, help="Keep this many likeliest tokens; 0 or -1: all."),
        click.option("--min-p", type=float, help="Keep tokens of this share of the best one's probability."),
        click.option("--seed", type=int, help="Makes draws repeatable."),
        click.option("--repetition-penalty", type=float, help="Above 1: avoid what prompt or answer hold."),
        click.option("--frequency-penalty", type=float, help="Avoid tokens each time they occur in the answer."),
        click.option("--presence-penalty", type=float, help="Avoid tokens once they occur in the answer."),
        click.option(
            "--logit-bias",
            multiple=True,
            type=TokenBias(),
            callback=_biases,
            help="Added to a token's logit; may be repeated (blanks between, in the environment).",
        ),
        click.option(
            "--bad-words",
            multiple=True,
            type=TokenIds(),
            help="Sequence of token ids that never appears; may be repeated (blanks between, in the environment).",
        ),
        click.option("--allowed-token-ids", type=TokenIds(), default=(), help="The only token ids to draw."),
    ]


def _output_options() -> list[Callable[[Any], Any]]:
    return [
        click.option("--json-schema", type=TextOrFile(), help="The answer is JSON of this schema."),
        click.option("--json-object", is_flag=True, help="The answer is a JSON object."),
        click.option("--regex", help="The answer matches this regular expression."),
        click.option("--grammar", type=TextOrFile(), help="The answer follows this grammar in Lark notation."),
        click.option(
            "--choice",
            "choices",
            multiple=True,
            type=LineText(),
            envvar="STEPAHEAD_CHOICE",
            help="The answer is one of these texts; repeated (in the environment: one per line).",
        ),
        click.option("--logprobs", type=int, help="Log probabilities of the tokens and of this many best."),
        click.option("--prompt-logprobs", type=int, help="The same of the prompt's tokens."),
        click.option("--processed-logprobs", is_flag=True, help="Of the distribution that was drawn from."),
    ]


def _scheduling_options() -> list[Callable[[Any], Any]]:
    return [
        click.option("--priority", type=int, help="Higher goes first, -1000 to 1000."),
        click.option("--cache-salt", default="", help="Share cached prefixes with requests of the same salt only."),
        click.option(
            "--approximate-replay-tokens",
            type=int,
            help="Positions that may be fed again at most for lost sliding windows, even if it takes more to be "
            "exact; an answer that this has changed says so.  [default: as many as it takes]",
        ),
        click.option("--timeout", type=float, help="Seconds for the whole request."),
        click.option("--queue-timeout", type=float, help="Seconds it may wait for admission."),
        click.option(
            "--reattach-window",
            type=float,
            help="Seconds to go on after a lost connection; 0: give up at once.  [default: 30]",
        ),
    ]


def _biases(
    ctx: click.Context, param: click.Parameter, value: tuple[tuple[int, float], ...]
) -> dict[int, float] | None:
    biases = dict(value)
    if len(biases) < len(value):
        raise click.BadParameter("a token id occurs twice", ctx, param)
    return biases or None


def stack_options(*, default_model: str | None = None) -> Callable[[_Callback], _Callback]:
    """The options of locally started services; unset ones are left to the services' defaults."""

    def decorate(command: _Callback) -> _Callback:
        return _apply(
            command,
            [
                click.option(
                    "--model",
                    required=default_model is None,
                    default=default_model,
                    type=ModelName(),
                    metavar=ModelName.name,
                    help="What to serve.",
                ),
                click.option("--workers", type=click.IntRange(1, 64), default=1, help="Worker processes."),
                click.option(
                    "--overlap", type=Overlap(), help="Plan steps before the tokens they follow are known."
                ),
                click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"])),
                click.option("--max-num-seqs", type=_COUNT, help="Sequences per worker at once."),
                click.option("--max-num-batched-tokens", type=_COUNT, help="Tokens per step."),
                click.option("--max-model-len", type=click.IntRange(2, _MOST), help="Positions per sequence."),
                click.option("--block-size", type=click.IntRange(1, 1024), help="Tokens per KV block."),
                click.option("--num-kv-blocks", type=_COUNT, help="KV blocks per worker."),
                click.option("--kv-cache-bytes", type=Size(), help="KV cache per worker, such as 2GiB."),
                click.option(
                    "--tensor-parallel-size",
                    type=click.IntRange(1, 1024),
                    help="Processes per worker that share the model.",
                ),
                click.option(
                    "--threads", type=click.IntRange(1, 256), help="Threads per process; several share the cores."
                ),
                click.option("--log-format", type=click.Choice(["console", "json"])),
                click.option(
                    "--drain-timeout",
                    type=Seconds(),
                    default=30.0,
                    help="Seconds that accepted requests may take after Ctrl-C.",
                ),
            ],
        )

    return decorate


def _apply(command: _Callback, options: Sequence[Callable[[Any], Any]]) -> _Callback:
    # Decorators apply from the last to the first; the help text then shows them in the order of the list.
    for option in reversed(options):
        command = option(command)
    return command
