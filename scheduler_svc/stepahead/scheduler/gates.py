"""Masks for constrained rows, on time and never on the step loop's time (design, semantics 4).

    worker     |==== forward N ====|wait| sample N |==== forward N+1 ====
    boundary N-1 --> commit N-1
                     `-> grammars take the tokens of N-1 ; masks of N in a thread ; plan N+1 meanwhile
                                         masks ready ----> gate N, past the queued plan

A gate names every constrained row of its step. A row whose choice has ended, or whose mask could not be made, is
told to skip: a constrained row is never sampled unconstrained (rule I2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import structlog

from stepahead.scheduler.constraints.errors import ConstraintError, MatcherError
from stepahead.scheduler.constraints.errors import NothingAllowed as NoTokenLeft
from stepahead.scheduler.convert import gate_to_proto
from stepahead.scheduler.core import CommitOutcome, Finished, GateRow, RequestKey, Scheduler, StepId
from stepahead.scheduler.errors import NothingAllowed, RowFailed
from stepahead.scheduler.live_request import LiveRequest
from stepahead.scheduler.request_book import RequestBook
from stepahead.scheduler.worker_link import WorkerLink

if TYPE_CHECKING:
    from stepahead.scheduler.constraints.compiler import CompiledConstraint
    from stepahead.scheduler.constraints.matcher import MaskPool, Matcher

log = structlog.get_logger("gates")

NUM_MASK_THREADS = 2

Masks = list[bytes | ConstraintError]


class Gates:
    """The grammars of live choices, and the gates of steps in flight. Event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: Scheduler, book: RequestBook) -> None:
        self._loop = loop
        self._core = core
        self._book = book
        self._matchers: dict[RequestKey, Matcher] = {}
        self._opened: dict[WorkerLink, tuple[int, StepId]] = {}
        """By link: epoch and newest step whose gate was made or is being made."""
        # One thread: a matcher is never asked twice at the same time. The pool's own threads share its work.
        self._thread = ThreadPoolExecutor(1, "masks")
        self._pool: MaskPool | None = None
        self.on_failed: Callable[[], None] = lambda: None
        """Called when requests have ended because no mask could be made."""

    def add(self, live: LiveRequest, compiled: CompiledConstraint) -> None:
        """A constrained request was accepted."""
        for choice in live.choices:
            self._matchers[choice.key] = compiled.matcher()

    def advance(self, outcome: CommitOutcome, ended: dict[RequestKey, Finished]) -> None:
        """The grammars take committed tokens, each once (rule I4). A complete text ends its choice.

        Args:
            outcome: of the commit.
            ended: choices that ended with it; those whose text is complete are added.
        """
        if not self._matchers:
            return
        for key, token in zip(outcome.keys, outcome.token_ids, strict=True):
            matcher = self._matchers.get(key)
            if matcher is None or key in ended or key not in self._book.choices:
                continue
            if not matcher.accept(token):
                choice = self._book.choices[key]  # rule I5
                log.error("token refused by the grammar that allowed it", request_key=key, token=token)
                text = f"after {len(choice.log.token_ids)} tokens: constraint: the grammar cannot go on"
                self._book.fail(choice.live, RowFailed(text, metadata={"fault": "constraint_failed"}))
            elif matcher.is_finished:
                self._finish(key, ended)
        for key in [key for key in self._matchers if key in ended or key not in self._book.choices]:
            del self._matchers[key]

    def _finish(self, key: RequestKey, ended: dict[RequestKey, Finished]) -> None:
        """Nothing can follow. Waiting for an end of text would cost a step, and not every model has one."""
        sequence = self._core.sequences[key]
        if sequence.num_output_tokens < sequence.request.min_tokens:
            return  # the next gate finds nothing to allow, and says so
        finished = self._core.finish_at(key, sequence.num_output_tokens)
        if finished is not None:
            ended[key] = finished

    def open(self, link: WorkerLink) -> None:
        """Sends the gate of the lane's oldest step, if it has constrained rows and got none yet."""
        if not self._matchers and link not in self._opened:
            return
        found = self._core.gate_rows(link.lane_id)
        if found is None:
            return
        step_id, rows = found
        epoch, newest = self._opened.get(link, (0, StepId(0)))
        if epoch == link.worker_epoch and step_id <= newest:
            return
        self._opened[link] = (link.worker_epoch, step_id)
        if not rows:
            return
        asked = [(row.key, self._matchers[row.key]) for row in rows if row.wanted and row.key in self._matchers]
        if not asked:
            link.send_gate(gate_to_proto(step_id, rows, {}))
            return
        keys = [key for key, _ in asked]
        made = self._loop.run_in_executor(self._thread, self._fill, [matcher for _, matcher in asked])
        made.add_done_callback(partial(self._made, link, link.worker_epoch, step_id, rows, keys))

    def _fill(self, matchers: Sequence[Matcher]) -> Masks:
        if self._pool is None:
            from stepahead.scheduler.constraints.matcher import MaskPool  # noqa: PLC0415 - loads llguidance

            self._pool = MaskPool(NUM_MASK_THREADS)
        return list(self._pool.fill_masks(matchers))

    def _made(
        self,
        link: WorkerLink,
        epoch: int,
        step_id: StepId,
        rows: list[GateRow],
        keys: list[RequestKey],
        made: asyncio.Future[Masks],
    ) -> None:
        """Masks are ready. Requests may have ended meanwhile, and so may the session."""
        if made.cancelled() or link.worker_epoch != epoch:
            return
        masks: dict[RequestKey, bytes] = {}
        fault = made.exception()
        results: Masks = [ConstraintError(repr(fault))] * len(keys) if fault is not None else made.result()
        failed = False
        for key, mask in zip(keys, results, strict=True):
            choice = self._book.choices.get(key)
            if choice is None:
                continue
            if isinstance(mask, bytes):
                masks[key] = mask
                continue
            failed = True
            if isinstance(mask, NoTokenLeft):
                self._book.fail(choice.live, NothingAllowed(len(choice.log.token_ids)))
            elif isinstance(mask, MatcherError):
                text = f"after {len(choice.log.token_ids)} tokens: {mask}"
                self._book.fail(choice.live, RowFailed(text, metadata={"fault": "constraint_failed"}))
            else:
                self._book.fail_internally(choice.live, mask)
        link.send_gate(gate_to_proto(step_id, rows, masks))
        if failed:
            self.on_failed()

    def forget(self, link: WorkerLink) -> None:
        """The link's session is over."""
        self._opened.pop(link, None)

    def close(self) -> None:
        """No more masks."""
        self._thread.shutdown(wait=False, cancel_futures=True)
