"""Renders conversations with the model's chat template, as transformers' apply_chat_template does.

The environment follows transformers 5 (utils/chat_template_utils.py): an immutable sandbox, trimmed blocks,
loop controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, the `generation` tag
as a no-op. A template comes with the model, which the operator chooses; it is code from outside all the
same. Its output is bounded here, its running time is not: render in a thread, not in an event loop.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
from typing_extensions import override

from stepahead.scheduler.text.errors import BundleError, ChatTemplateError

# Twice the largest prompt text of the public API (4 MiB), so that the API's own limit speaks first.
MAX_RENDERED_CHARS: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the type of the base class's attribute

    @override
    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses underscore names: they would let a template pose as another type."""

    def __init__(self, /, *args: object, **kwargs: object) -> None:
        attributes: dict[str, object] = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    @override
    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} starts with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(  # mirrors transformers' filter, whose options templates use
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - templates may pass it by position
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _local_now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()


class ChatTemplate:
    """A compiled chat template."""

    __slots__ = ("_max_chars", "_special_tokens", "_template")

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime.datetime] = _local_now,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Compiles `source`.

        Args:
            source: The Jinja template.
            special_tokens: By the names templates use, such as bos_token; those the model has.
            now: Local time, for templates that print the date.
            max_chars: Longest text a conversation may render to, in characters.

        Raises:
            BundleError: The template does not compile.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json

        def strftime_now(pattern: str) -> str:
            return now().strftime(pattern)

        template_globals = cast("dict[str, object]", environment.globals)
        template_globals.update(raise_exception=_raise_exception, strftime_now=strftime_now, namespace=_Namespace)
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as error:
            raise BundleError(f"chat_template.jinja: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars

    def render(self, messages: Sequence[ChatTurn], *, add_generation_prompt: bool) -> str:
        """The prompt text of a conversation.

        Raises:
            ChatTemplateError: The template refuses the conversation, fails, or renders more than `max_chars`.
        """
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                messages=[{"role": turn.role, "content": turn.content} for turn in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                num_chars += len(part)
                if num_chars > self._max_chars:
                    raise ChatTemplateError(f"messages: the rendered prompt exceeds {self._max_chars} characters")
                parts.append(part)
        except ChatTemplateError:
            raise
        except Exception as error:
            # A template is a program: it may fail with any exception.
            raise ChatTemplateError(f"messages: the model's chat template failed: {error}") from error
        return "".join(parts)
