"""Committed tokens that are not in the histories yet.

A step of a steady decode set adds one token to every history. Done at once that is one scattered write per row and
step, which at a thousand rows misses the caches and costs more than the rest of the commit. So the tokens of a step
stay together as one column, and every so often all columns of a set are appended to its histories in one pass.

Whoever reads a history goes through `Sequence.history`, which empties the backlog of its lane first; nobody sees a
history without its last tokens.
"""

from __future__ import annotations

MAX_COLUMNS = 32
"""Steps after which the histories are brought up to date anyway."""


class TokenBacklog:
    """Columns of tokens, one per step, for one list of histories at a time."""

    __slots__ = ("_columns", "_histories")

    def __init__(self) -> None:
        self._histories: list[list[int]] = []
        self._columns: list[list[int]] = []

    def push(self, histories: list[list[int]], tokens: list[int]) -> None:
        """Adds one token to each history, sooner or later.

        Args:
            histories: recognised by identity; another list than last time makes the earlier tokens final.
            tokens: one per history; the list must not change any more.
        """
        if histories is not self._histories:
            self.flush()
            self._histories = histories
        self._columns.append(tokens)
        if len(self._columns) == MAX_COLUMNS:
            self.flush()

    def num_missing(self, history: list[int]) -> int:
        """For invariant checks: tokens that one history lacks. Changes nothing."""
        return len(self._columns) if any(other is history for other in self._histories) else 0

    def flush(self) -> None:
        """Brings the histories up to date."""
        columns = self._columns
        if not columns:
            return
        self._columns = []
        if len(columns) == 1:
            for history, token in zip(self._histories, columns[0], strict=True):
                history.append(token)
            return
        for history, tokens in zip(self._histories, zip(*columns, strict=True), strict=True):
            history.extend(tokens)
