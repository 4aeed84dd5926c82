"""One stream's view of one request: cursors on its logs, turned into events."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from stepahead.scheduler.delivery import StreamWriter
from stepahead.scheduler.live_request import Choice, LiveRequest
from stepahead.scheduler.logprobs import to_columns
from stepahead.scheduler.output_log import LogCursor
from stepahead.v1 import generation_pb2

Events = RepeatedCompositeFieldContainer[generation_pb2.GenerationEvent]
"""Of the message that is being made: filled in place, as a message made apart would be copied into it."""


class Subscription:
    """What one stream has been told of one request."""

    __slots__ = ("_ended", "_num_prompt_records", "cursors", "dirty", "handle", "is_plain", "live", "started_sent",
                 "writer")  # fmt: skip

    def __init__(
        self,
        live: LiveRequest,
        writer: StreamWriter,
        *,
        handle: int = 0,
        dirty: dict[Subscription, None] | None = None,
        next_token_indexes: Sequence[int] = (),
    ) -> None:
        """Subscribes to a request.

        Args:
            live: The request.
            writer: The stream that gets turns.
            handle: The request's name on a Multiplex stream.
            dirty: Where a stream of many requests collects those that have news.
            next_token_indexes: Per choice, what the reader wants first; missing entries count as 0.

        Raises:
            DetokenizeError: a token cannot be decoded.
        """
        self.live = live
        self.writer = writer
        self.handle = handle
        self.dirty = dirty
        accepted = live.accepted
        self.is_plain = (
            accepted.want_token_ids
            and not accepted.want_text
            and not accepted.final_only
            and accepted.sampling.logprobs_top_k is None
            and len(live.choices) == 1
        )
        """Whether its deltas are nothing but token ids, and may travel as columns."""
        self.cursors = [LogCursor() for _ in live.choices]
        for index, token_index in enumerate(next_token_indexes):
            self.cursors[index] = live.choices[index].log.cursor_at(token_index)
        self.started_sent = False
        # Who has outputs has had what came before them.
        self._num_prompt_records = len(live.prompt_logprobs.records) if any(next_token_indexes) else 0
        self._ended = [False] * len(live.choices)
        for choice in live.choices:
            choice.log.leave_columns()  # of another reader
        live.subscriptions.append(self)

    def note_news(self) -> None:
        """There is something to take. The writer must get a turn."""
        if self.dirty is not None:
            self.dirty[self] = None

    def close(self) -> None:
        """The stream reads no more."""
        for choice in self.live.choices:
            choice.log.leave_columns()
        if self in self.live.subscriptions:
            self.live.subscriptions.remove(self)

    def take(self, events: Events) -> bool:
        """Adds everything new; returns whether nothing follows.

        Raises:
            DetokenizeError: a token cannot be decoded; nothing was added.
        """
        live = self.live
        accepted = live.accepted
        if accepted.want_text:
            # Before anything is taken: a text error must not lose what was taken already.
            for choice in live.choices:
                if choice.finished is None:
                    choice.log.decode()
        if not self.started_sent and live.times.admitted_ns:
            self.started_sent = True
            events.append(live.started_event())
        if live.is_over or not accepted.final_only:
            records = live.prompt_logprobs.records
            if len(records) > self._num_prompt_records:
                events.extend(live.prompt_logprobs.events(self._num_prompt_records))
                self._num_prompt_records = len(records)
            for choice in live.choices:
                if not self._ended[choice.index]:
                    self._take_choice(choice, events)
        if live.is_over and live.error is None:
            events.append(live.finished_event())
        return live.is_over

    def _take_choice(self, choice: Choice, events: Events) -> None:
        accepted = self.live.accepted
        fresh = choice.log.read(self.cursors[choice.index])
        if fresh is not None:
            token_ids = fresh.token_ids if accepted.want_token_ids else ()
            text = fresh.text if accepted.want_text else ""  # stop strings make text that nobody asked for
            if token_ids or text or fresh.logprobs:
                delta = events.add().delta
                delta.choice_index = choice.index
                delta.first_token_index = fresh.first_token_index
                delta.token_ids.extend(token_ids)
                delta.text = text
                if fresh.logprobs:
                    delta.logprobs.CopyFrom(to_columns(fresh.logprobs))
        if choice.finished is not None:
            self._ended[choice.index] = True
            # A request that was never admitted ends with its status alone: nothing comes before Started.
            if self.started_sent:
                events.append(choice.finished_event())
