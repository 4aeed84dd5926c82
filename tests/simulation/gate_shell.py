"""What the real `Gates` of the service is run with in the simulation: a thread for masks that ends when the
adversary wants it to, and the book and the links of the shell as far as gates look at them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepahead.scheduler.constraints.errors import ConstraintError, MatcherFailed, NothingAllowed
from stepahead.scheduler.core import LaneId, RequestKey
from stepahead.scheduler.errors import ApiError
from stepahead.v1 import worker_pb2
from tests.simulation.tagged_model import Grammar


@dataclass
class Log:
    """A choice's tokens, as far as its client has them."""

    token_ids: list[int]


@dataclass
class Choice:
    """As much of the shell's as gates read."""

    key: RequestKey
    live: Live
    log: Log


@dataclass(eq=False)
class Live:
    """A request of one or several choices."""

    choices: list[Choice] = field(default_factory=list[Choice])
    is_broken: bool = False
    """Whether a mask of it could not be made."""


class Book:
    """Choices that have not ended."""

    def __init__(self, fail: Callable[[Live, ApiError], None]) -> None:
        self.choices: dict[RequestKey, Choice] = {}
        self.fail = fail

    def add(self, live: Live) -> None:
        self.choices |= {choice.key: choice for choice in live.choices}

    def is_over(self, live: Live) -> bool:
        return not any(choice.key in self.choices for choice in live.choices)

    def fail_internally(self, live: Live, error: Exception) -> None:
        """Nothing here may fail like that."""
        raise AssertionError(f"I5: a mask could not be made for {live}") from error


class Matcher:
    """A place in a grammar."""

    def __init__(self, grammar: Grammar, live: Live) -> None:
        self.live = live
        self.accepted: list[int] = []
        self._grammar = grammar

    @property
    def is_finished(self) -> bool:
        return self._grammar.is_complete(self.accepted)

    def accept(self, token: int) -> bool:
        if token not in self._grammar.allowed(self.accepted):
            return False
        self.accepted.append(token)
        return True

    def mask(self) -> bytes:
        """One bit per token; at least one is set. Raises NothingAllowed."""
        mask = bytearray(-(-self._grammar.vocab // 8))
        for token in self._grammar.allowed(self.accepted):
            mask[token >> 3] |= 1 << (token & 7)
        if not any(mask):
            raise NothingAllowed("constraint: no token can follow")
        return bytes(mask)


@dataclass(frozen=True)
class Compiled:
    """A constraint of a request."""

    grammar: Grammar
    live: Live

    def matcher(self) -> Matcher:
        return Matcher(self.grammar, self.live)


class MaskJob:
    """The masks of one step, being made: a future."""

    def __init__(self, matchers: Sequence[Matcher], *, withheld: bool, fails: bool) -> None:
        self.matchers = matchers
        self.withheld = withheld
        """Not made before one of its requests is over."""
        self.fails = fails
        """The first grammar of them reaches a limit."""
        self.asked_after = [len(matcher.accepted) for matcher in matchers]
        self._then: Callable[[MaskJob], None] = lambda _: None
        self._masks: list[bytes | ConstraintError] = []

    def add_done_callback(self, then: Callable[[MaskJob], None]) -> None:
        self._then = then

    def cancelled(self) -> bool:
        return False

    def exception(self) -> None:
        """It did not fail."""

    def result(self) -> list[bytes | ConstraintError]:
        return self._masks

    def finish(self) -> None:
        """Raises if a grammar has moved since it was asked: the thread would have read it in mid-change."""
        if [len(matcher.accepted) for matcher in self.matchers] != self.asked_after:
            raise AssertionError("I1: a grammar takes a token while its mask is made")
        for matcher in self.matchers:
            if self.fails and not self._masks:
                matcher.live.is_broken = True
                self._masks.append(MatcherFailed("constraint: the grammar is too complex at this place"))
                continue
            try:
                self._masks.append(matcher.mask())
            except NothingAllowed as error:
                self._masks.append(error)
        self._then(self)


class MaskThread:
    """Stands for the event loop: what is run in its executor waits here, in order, for the adversary."""

    def __init__(self, rng: random.Random, book: Book, *, withholds: bool, fail_rate: float) -> None:
        self.jobs: deque[MaskJob] = deque()
        self._rng = rng
        self._book = book
        self._withholds = withholds
        self._fail_rate = fail_rate

    def run_in_executor(self, _executor: object, _fill: object, matchers: Sequence[Matcher]) -> MaskJob:
        withheld = self._withholds and self._rng.random() < 0.1
        self.jobs.append(MaskJob(matchers, withheld=withheld, fails=self._rng.random() < self._fail_rate))
        return self.jobs[-1]

    @property
    def is_held(self) -> bool:
        """Whether the oldest job is not made as long as its requests live."""
        job = self.jobs[0]
        return job.withheld and not any(self._book.is_over(matcher.live) for matcher in job.matchers)


@dataclass(eq=False)
class Link:
    """A worker's connection, as far as gates use it."""

    lane_id: LaneId
    send: Callable[[LaneId, worker_pb2.SampleGate], None]
    worker_epoch: int = 0
    """0: no session."""

    def send_gate(self, gate: worker_pb2.SampleGate) -> None:
        self.send(self.lane_id, gate)
