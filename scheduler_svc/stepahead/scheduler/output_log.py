"""What a choice has said so far: one append-only log; streams are cursors on it.

tokens   t0 t1 t2 t3 t4 t5 t6 ...            grows at commit, in the engine's turn; log probabilities beside it
text            "He" "llo wor"               grows when somebody looks (or at commit, with stop strings)
                     ^ cursor of stream A    each stream reads at its own pace; nothing is ever rewritten
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepahead.scheduler.core import TokenLogprobs
from stepahead.scheduler.text.choice_text import ChoiceText

if TYPE_CHECKING:
    from stepahead.scheduler.steady_rows import SteadyRows
    from stepahead.scheduler.stream_rows import StreamRow

MakeText = Callable[[], ChoiceText]


@dataclass(frozen=True, slots=True)
class LogSlice:
    """New output between a cursor and the end of the log."""

    first_token_index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    """One per token, or none at all."""


class LogCursor:
    """A reader's place in a log."""

    __slots__ = ("characters_to_skip", "chunk_index", "token_index")

    def __init__(self) -> None:
        self.token_index = 0
        self.chunk_index = 0
        self.characters_to_skip = 0
        """Of the text from `chunk_index` on: what the reader has already."""


class OutputLog:
    """Tokens, text and log probabilities of one choice."""

    __slots__ = (
        "_chunks",
        "_make_text",
        "_num_decoded",
        "_text",
        "_token_ids",
        "ends_with_stop_id",
        "logprobs",
        "matched_stop",
        "steady",
    )

    def __init__(self, make_text: MakeText | None) -> None:
        """Starts an empty log.

        Args:
            make_text: makes the decoder of this choice; None: no text.
        """
        self._token_ids: list[int] = []
        self.steady: SteadyRows | StreamRow | None = None
        """Columns with tokens that this log may lack. Who moves a cursor or ends the log leaves them first."""
        self.logprobs: list[TokenLogprobs] = []
        """As many as there are tokens, if the request asks for them."""
        self.matched_stop: str | None = None
        self.ends_with_stop_id = False
        self._make_text = make_text
        self._text = make_text() if make_text is not None else None
        self._chunks: list[str] = []
        self._num_decoded = 0

    @property
    def token_ids(self) -> list[int]:
        """All of them; grows in place."""
        if self.steady is not None:
            self.steady.settle()
        return self._token_ids

    @property
    def has_text(self) -> bool:
        """Whether somebody asks for text, or for stop strings."""
        return self._make_text is not None

    def leave_columns(self) -> None:
        """From now on tokens come one by one."""
        if self.steady is not None:
            self.steady.dissolve()

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Adds an output."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def decode(self) -> str | None:
        """Decodes tokens that were appended since the last call. Returns a stop string if one completed.

        Raises:
            DetokenizeError: a token cannot be decoded; this choice cannot go on, others can (rule K8).
        """
        if self._text is None or self.matched_stop is not None:
            return self.matched_stop
        fresh = self.token_ids[self._num_decoded :]
        if not fresh:
            return None
        step = self._text.push(fresh)
        self._num_decoded += step.tokens_used
        if step.text:
            self._chunks.append(step.text)
        self.matched_stop = step.matched_stop
        return step.matched_stop

    @property
    def num_decoded(self) -> int:
        """Tokens whose text is known; after a match: up to the token that completed it."""
        return self._num_decoded

    def end(self, num_tokens: int, *, ends_with_stop_id: bool) -> None:
        """The choice ended after `num_tokens`; text that was held back becomes final.

        A stop id is one of the tokens and no part of the text.

        Raises:
            DetokenizeError: see decode().
        """
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens:]
        self.ends_with_stop_id = ends_with_stop_id
        text = self._text
        if text is None:
            return
        if self.matched_stop is None:
            visible = num_tokens - ends_with_stop_id
            step = text.push(self.token_ids[self._num_decoded : visible])
            if step.text:
                self._chunks.append(step.text)
        tail = text.finish()
        if tail:
            self._chunks.append(tail)
        self._text = None

    def cursor_at(self, token_index: int) -> LogCursor:
        """The place of a reader that has the first `token_index` tokens and all text that was final by then.

        Raises:
            DetokenizeError: see decode().
        """
        cursor = LogCursor()
        cursor.token_index = token_index
        if self._make_text is not None and token_index:
            # Text does not depend on how tokens were grouped (rule K1), so what a reader got can be made again.
            visible = len(self.token_ids) - self.ends_with_stop_id
            cursor.characters_to_skip = len(
                self._make_text().push(self.token_ids[: min(token_index, visible)]).text
            )
        return cursor

    def read(self, cursor: LogCursor) -> LogSlice | None:
        """Everything behind the cursor, which moves to the end; None if there is nothing new."""
        first = cursor.token_index
        token_ids = self.token_ids[first:]
        text = "".join(self._chunks[cursor.chunk_index :])
        if cursor.characters_to_skip:
            skipped = min(cursor.characters_to_skip, len(text))
            cursor.characters_to_skip -= skipped
            text = text[skipped:]
        cursor.chunk_index = len(self._chunks)
        if not token_ids and not text:
            return None
        cursor.token_index = first + len(token_ids)
        return LogSlice(first, token_ids, text, self.logprobs[first:])
