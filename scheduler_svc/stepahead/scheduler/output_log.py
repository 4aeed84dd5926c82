"""What a request has said so far: one append-only log per choice; streams are cursors on it.

tokens   t0 t1 t2 t3 t4 t5 t6 ...            grows at commit, in the engine's turn
text            "He" "llo wor"               grows when somebody looks (or at commit, with stop strings)
                     ^ cursor of stream A    each stream reads at its own pace; nothing is ever rewritten
"""

from __future__ import annotations

from dataclasses import dataclass

from stepahead.scheduler.text.choice_text import ChoiceText


@dataclass(frozen=True, slots=True)
class LogSlice:
    """New output between a cursor and the end of the log."""

    first_token_index: int
    token_ids: list[int]
    text: str


class LogCursor:
    """A reader's place in a log."""

    __slots__ = ("chunk_index", "token_index")

    def __init__(self) -> None:
        self.token_index = 0
        self.chunk_index = 0


class OutputLog:
    """Tokens and text of one choice."""

    __slots__ = ("_chunks", "_num_decoded", "_text", "ends_with_stop_id", "matched_stop", "token_ids")

    def __init__(self, text: ChoiceText | None) -> None:
        self.token_ids: list[int] = []
        self.matched_stop: str | None = None
        self.ends_with_stop_id = False
        self._text = text
        self._chunks: list[str] = []
        self._num_decoded = 0

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

    def read(self, cursor: LogCursor) -> LogSlice | None:
        """Everything behind the cursor, which moves to the end; None if there is nothing new."""
        first = cursor.token_index
        token_ids = self.token_ids[first:]
        chunks = self._chunks[cursor.chunk_index :]
        if not token_ids and not chunks:
            return None
        cursor.token_index = len(self.token_ids)
        cursor.chunk_index = len(self._chunks)
        return LogSlice(first, token_ids, "".join(chunks))
