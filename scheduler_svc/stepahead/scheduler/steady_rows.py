"""Steady decode over Multiplex: a column of tokens per step, not an append, a mark and a cursor per row.

While the rows of a lane's steps stay the same, whatever many of them have in common is done once:

    rows        r0 r1 r2 r3 r4 ...      of which r0 r1 r3 are one stream's, which wants nothing but token ids
    step k      t0 t1 t2 t3 t4          (t0 t1 t3) is a column: the stream's next message takes it as it is,
    step k+1    u0 u1 u2 u3 u4          and the three output logs when somebody reads one of them

Whatever concerns a single request (its end, a cancel, another reader, another lane) dissolves the columns of its
rows first: then every log and cursor stands where it would stand without them. So do rows that change, and a reader
that falls far behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

from stepahead.scheduler.delivery import MessageBudget, StreamWriter
from stepahead.scheduler.stream_rows import StreamRows

if TYPE_CHECKING:
    from stepahead.scheduler.core import RequestKey
    from stepahead.scheduler.live_request import Choice
    from stepahead.scheduler.subscription import Subscription

STEADY_AFTER = 3
"""Commits of the same rows before columns are made of them: where rows come and go every step, it never pays."""
MIN_ROWS = 8
MAX_UNSETTLED = 32
"""Columns that the logs may lack."""
MAX_UNTOLD_TOKENS = 2**16
"""Of a stream that is behind: a message of them stays far below its limit."""


class LaneRows:
    """The rows that a lane commits, for as long as they stay the same."""

    __slots__ = ("_asked", "_num_commits", "_rest", "choices", "keys", "steady", "streams")

    def __init__(self, keys: list[RequestKey], choices: list[Choice | None]) -> None:
        """Starts without columns.

        Args:
            keys: the core's list, recognised by identity.
            choices: of the rows; None: it has ended.
        """
        self.keys = keys
        self.choices = choices
        self.steady: list[SteadyRows] = []
        self.streams: StreamRows | None = None
        self._num_commits = 0
        self._rest: list[int] = []  # rows that are in no column, while there are columns
        self._asked: set[StreamWriter] = set()

    def commit(self, tokens: list[int], budget: MessageBudget) -> Iterable[tuple[Choice | None, int]]:
        """A step's tokens, one per row: those of steady rows are taken, the other rows' are returned."""
        self._num_commits += 1
        if self._num_commits == STEADY_AFTER:
            self.streams = StreamRows(self.choices, self._rest)
            self._find_rest()
        if not self.steady and (self.streams is None or not self.streams.members):
            return zip(self.choices, tokens, strict=True)
        rest = [(self.choices[index], tokens[index]) for index in self._rest]
        if self.streams is not None:
            self.streams.push(tokens, budget)
        for steady in list(self.steady):
            steady.push(tokens)
            budget.request(steady.writer)
        return rest

    def make_columns(
        self, writer: StreamWriter, news: dict[SteadyRows, None], caught_up: Mapping[Subscription, None]
    ) -> None:
        """Makes columns of a stream's rows, once, if there are many and all have been told everything.

        Args:
            writer: the stream.
            news: where columns that it has not taken are noted.
            caught_up: its requests for nothing but token ids that have run and been told all there is.
        """
        if self._num_commits < STEADY_AFTER or writer in self._asked:
            return
        indexes: list[int] = []
        for index, choice in enumerate(self.choices):
            if choice is None or choice.finished is not None or choice.log.has_text or not choice.live.has_spoken:
                continue
            readers = choice.live.subscriptions
            if len(readers) == 1 and readers[0] in caught_up:
                indexes.append(index)
        if len(indexes) >= MIN_ROWS:
            self._asked.add(writer)
            self.steady.append(SteadyRows(self, indexes, writer, news))
            self._find_rest()

    def forget(self, steady: SteadyRows) -> None:
        """Its rows are looked at one by one again."""
        self.steady.remove(steady)
        self._find_rest()

    def _find_rest(self) -> None:
        taken = set(chain.from_iterable(steady.indexes for steady in self.steady))
        if self.streams is not None:
            taken.update(self.streams.members)
        self._rest[:] = [index for index in range(len(self.choices)) if index not in taken]

    def dissolve(self) -> None:
        """The rows have changed."""
        for steady in list(self.steady):
            steady.dissolve()
        if self.streams is not None:
            self.streams.dissolve()


class SteadyRows:
    """The rows of one stream among those of a lane."""

    __slots__ = ("_first", "_logs", "_news", "_pick", "_rows", "_subscriptions", "_tokens_of", "_unsettled",
                 "_untold", "handles", "indexes", "writer")  # fmt: skip

    def __init__(
        self, rows: LaneRows, indexes: list[int], writer: StreamWriter, news: dict[SteadyRows, None]
    ) -> None:
        """Takes rows whose only reader, the stream, has been told everything.

        Args:
            rows: all of the lane's.
            indexes: at least two of them.
            writer: the stream.
            news: see `LaneRows.make_columns`.
        """
        choices = [choice for choice in map(rows.choices.__getitem__, indexes) if choice is not None]
        self.indexes = indexes
        self.writer = writer
        self._rows = rows
        self._news = news
        self._pick = itemgetter(*indexes) if len(indexes) < len(rows.choices) else None
        self._subscriptions = [choice.live.subscriptions[0] for choice in choices]
        self.handles = [subscription.handle for subscription in self._subscriptions]
        self._logs = [choice.log for choice in choices]
        self._tokens_of = [log.token_ids for log in self._logs]
        self._first = [len(tokens) for tokens in self._tokens_of]  # per row: of the first column that is untold
        self._unsettled: list[Sequence[int]] = []
        self._untold: list[Sequence[int]] = []
        for log in self._logs:
            log.steady = self

    def push(self, tokens: list[int]) -> None:
        """A step's tokens, of all rows of the lane. The writer must get a turn."""
        column = tokens if self._pick is None else self._pick(tokens)
        self._unsettled.append(column)
        self._untold.append(column)
        self._news[self] = None
        if len(self._untold) * len(self.handles) > MAX_UNTOLD_TOKENS:
            self.dissolve()
        elif len(self._unsettled) == MAX_UNSETTLED:
            self.settle()

    def take(self) -> tuple[list[int], list[int], int]:
        """What is untold, told now: the index of each row's first token, tokens row by row, tokens per row."""
        columns, self._untold = self._untold, []
        first, count = self._first, len(columns)
        self._first = [index + count for index in first]
        tokens = list(columns[0] if count == 1 else chain.from_iterable(zip(*columns, strict=True)))
        return first, tokens, count

    def settle(self) -> None:
        """Brings the logs up to date."""
        columns = self._unsettled
        if columns:
            self._unsettled = []
            for tokens, fresh in zip(self._tokens_of, zip(*columns, strict=True), strict=True):
                tokens.extend(fresh)

    def dissolve(self) -> None:
        """Every log and cursor stands where it belongs, and goes on by itself."""
        self._rows.forget(self)
        self.settle()
        for subscription, log, first in zip(self._subscriptions, self._logs, self._first, strict=True):
            subscription.cursors[0].token_index = first
            log.steady = None
        if self in self._news:
            del self._news[self]
            for subscription in self._subscriptions:
                subscription.note_news()
