"""Steady decode over Generate: a step's tokens are kept as they came, and picked when a stream takes its turn.

    rows        r0 r1 r2 r3 r4 ...       r1 and r3 are streams of their own
    step k      t0 t1 t2 t3 t4           the list of the step is a column; nothing is done per row
    step k+1    u0 u1 u2 u3 u4           r1's turn: its log gets t1 u1, and the next step asks for another turn

Where there are hundreds of streams, each has a turn every ten steps or so: a row costs the loop per message, not
per step. As with `SteadyRows`, whatever concerns a single request makes its row leave first, its log up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from stepahead.scheduler.delivery import MessageBudget

if TYPE_CHECKING:
    from stepahead.scheduler.live_request import Choice

MAX_COLUMNS = 64
"""Columns that logs may lack."""


class StreamRows:
    """The rows of a lane that are streams of their own."""

    __slots__ = ("_leavers", "columns", "members", "taken")

    def __init__(self, choices: Sequence[Choice | None], leavers: list[int]) -> None:
        """Takes the rows that may be told from columns.

        Args:
            choices: of all rows of the lane; None: it has ended.
            leavers: where the indexes of rows that leave are noted.
        """
        self.columns: list[Sequence[int]] = []
        self._leavers = leavers
        self.members = {
            index: StreamRow(self, index, choice)
            for index, choice in enumerate(choices)
            if choice is not None and _is_stream(choice)
        }
        self.taken = list(self.members.values())
        """Rows whose readers may have had their turn since they were last asked for one."""

    def push(self, tokens: Sequence[int], budget: MessageBudget) -> None:
        """A step's tokens, of all rows of the lane."""
        self.columns.append(tokens)
        request_turn = budget.request
        taken, self.taken = self.taken, []
        for row in taken:
            row.is_taken = False
            if row.choice.finished is not None:
                continue
            for subscription in row.choice.live.subscriptions:
                request_turn(subscription.writer)
        if len(self.columns) == MAX_COLUMNS:
            for row in self.members.values():
                row.pick()
                row.num_picked = 0
            self.columns = []

    def leave(self, row: StreamRow) -> None:
        """The row goes on by itself."""
        del self.members[row.index]
        self._leavers.append(row.index)

    def dissolve(self) -> None:
        """The lane's rows have changed."""
        for row in list(self.members.values()):
            row.dissolve()
        self.taken = []  # rows know these rows: no cycle is left


class StreamRow:
    """A row, as its output log sees it."""

    __slots__ = ("_rows", "_token_of", "_tokens", "choice", "index", "is_taken", "num_picked")

    def __init__(self, rows: StreamRows, index: int, choice: Choice) -> None:
        self.index = index
        self.choice = choice
        self.num_picked = 0
        """Columns whose token the log has."""
        self.is_taken = True
        """Whether it is noted in `StreamRows.taken`."""
        self._rows = rows
        self._token_of = itemgetter(index)
        self._tokens = choice.log.token_ids
        choice.log.steady = self

    def pick(self) -> None:
        """Brings the log up to date."""
        columns = self._rows.columns
        if self.num_picked < len(columns):
            self._tokens.extend(map(self._token_of, columns[self.num_picked :]))
            self.num_picked = len(columns)

    def settle(self) -> None:
        """Somebody looks at the log, perhaps a reader that has its turn."""
        self.pick()
        if not self.is_taken:
            self.is_taken = True
            self._rows.taken.append(self)

    def dissolve(self) -> None:
        """From now on tokens come one by one."""
        self.pick()
        self.choice.log.steady = None
        self._rows.leave(self)


def _is_stream(choice: Choice) -> bool:
    """Whether all that a step means to a row is a token more."""
    accepted = choice.live.accepted
    return (
        choice.finished is None  # an error may have ended it in this very turn
        and choice.log.steady is None
        and choice.live.has_spoken
        and not accepted.stop_strings  # scanned at commit
        and accepted.sampling.logprobs_top_k is None
        and all(subscription.dirty is None for subscription in choice.live.subscriptions)  # no Multiplex stream
    )
