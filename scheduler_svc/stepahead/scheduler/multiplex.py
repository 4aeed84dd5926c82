"""Multiplex: many requests over one stream, one message per completed write and 2 ms, holding whatever is pending.

Token deltas of requests without text travel as columns, so that a step of 256 rows is one small message and not
256 objects. The session is one writer for the message budget, however many requests it carries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import cast

import grpc
import structlog

from stepahead.scheduler.caller import Caller, caller_of
from stepahead.scheduler.errors import ApiError, FieldViolation, InternalError, InvalidRequest, RequestCancelled
from stepahead.scheduler.front_end import FrontEnd
from stepahead.scheduler.live_request import LiveRequest
from stepahead.scheduler.request_decoding import Undecodable
from stepahead.scheduler.steady_rows import MIN_ROWS, SteadyRows
from stepahead.scheduler.subscription import Subscription
from stepahead.scheduler.telemetry import incident_id
from stepahead.scheduler.text.errors import TextError
from stepahead.v1 import generation_pb2

log = structlog.get_logger("multiplex")

MAX_MESSAGE_BYTES = 2**20
MAX_LIVE = 8192
MIN_INTERVAL_S = 0.002
"""From one message to the next: prompts that arrive together, and steps of several workers, share messages."""

MultiplexContext = grpc.aio.ServicerContext[generation_pb2.MultiplexRequest, generation_pb2.MultiplexResponse]


class MultiplexSession:
    """One Multiplex call: one writer for the budget, a subscription per request."""

    def __init__(self, front_end: FrontEnd, context: MultiplexContext) -> None:
        self.queued = False
        self.woken = False
        self._caller = Caller()
        self._front_end = front_end
        self._context = context
        self._subscriptions: dict[int, Subscription] = {}
        self._accepting: dict[int, asyncio.Task[None]] = {}
        self._dirty: dict[Subscription, None] = {}
        """Requests with news; the engine adds to it, so it is emptied, never replaced."""
        self._news: dict[SteadyRows, None] = {}
        """Columns with tokens that were not taken."""
        self._failures: deque[generation_pb2.RequestFailed] = deque()
        self._turn = asyncio.Event()
        self._reading = True
        self._half_closed = False

    async def run(self) -> None:
        """Reads and writes until the client has closed its side and every request has ended.

        Raises:
            InvalidRequest: the client broke the rules of the stream; all its requests are cancelled.
        """
        self._caller = caller_of(cast("grpc.aio.ServicerContext[object, object]", self._context))
        await self._context.send_initial_metadata(())
        reader = asyncio.create_task(self._read())
        try:
            await self._write()
        finally:
            reader.cancel()
            for task in self._accepting.values():
                task.cancel()
            await asyncio.gather(reader, *self._accepting.values(), return_exceptions=True)
            for subscription in self._subscriptions.values():
                self._front_end.release(subscription)
        if not reader.cancelled() and reader.exception() is not None:
            raise reader.exception() or AssertionError

    def wake(self) -> None:
        """Called by the budget: time for one message."""
        self._turn.set()

    # -------------------------------------------------------------------------------------------- reading

    async def _read(self) -> None:
        try:
            while True:
                message = cast(object, await self._context.read())
                if isinstance(message, Undecodable):
                    raise message.error()
                if not isinstance(message, generation_pb2.MultiplexRequest):
                    self._half_closed = True  # grpc.aio.EOF: the client has closed its side
                    return
                kind = message.WhichOneof("command")
                if kind == "submit":
                    self._submit(message.submit)
                elif kind == "cancel":
                    self._cancel(message.cancel)
                elif kind == "attach":
                    self._attach(message.attach)
                else:
                    raise InvalidRequest([FieldViolation("command", "submit, cancel or attach is required")])
        finally:
            self._reading = False
            self._turn.set()

    def _submit(self, submit: generation_pb2.MultiplexSubmit) -> None:
        handle = submit.handle
        if self._may_take(handle, "submit"):
            task = asyncio.create_task(self._accept(handle, submit.request))
            self._accepting[handle] = task

    def _attach(self, attach: generation_pb2.MultiplexAttach) -> None:
        handle, request = attach.handle, attach.request
        if not self._may_take(handle, "attach"):
            return
        self._front_end.engine.finish_turn()
        try:
            live = self._front_end.find(request, self._caller)
            self._subscribe(handle, live, request.next_token_indexes)
        except ApiError as error:
            self._fail(handle, error)
        except TextError as error:
            self._fail(handle, InternalError(self._note(error)))

    def _may_take(self, handle: int, command: str) -> bool:
        """Whether one more request may run under this handle.

        Raises:
            InvalidRequest: one does already.
        """
        if handle in self._subscriptions or handle in self._accepting:
            # Not in band: a failure under this handle would be read as the end of the request that is live.
            raise InvalidRequest([FieldViolation(f"{command}.handle", f"{handle} is live on this stream")])
        if len(self._subscriptions) + len(self._accepting) < MAX_LIVE:
            return True
        self._fail(handle, InvalidRequest([FieldViolation(command, f"more than {MAX_LIVE} live requests")]))
        return False

    async def _accept(self, handle: int, request: generation_pb2.GenerateRequest) -> None:
        try:
            live = await self._front_end.accept(request, self._caller, time_remaining_s=None)
        except ApiError as error:
            self._fail(handle, error)
            return
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others' stream
            self._fail(handle, InternalError(self._note(error)))
            return
        finally:
            if self._accepting.get(handle) is asyncio.current_task():
                del self._accepting[handle]
        self._subscribe(handle, live)

    def _subscribe(self, handle: int, live: LiveRequest, next_token_indexes: Sequence[int] = ()) -> None:
        subscription = self._front_end.subscribe(
            live, self, handle=handle, dirty=self._dirty, next_token_indexes=next_token_indexes
        )
        self._subscriptions[handle] = subscription
        if live.has_news:
            subscription.note_news()
            self._turn.set()

    def _cancel(self, cancel: generation_pb2.MultiplexCancel) -> None:
        for handle in cancel.handles:
            subscription = self._subscriptions.get(handle)
            if subscription is not None:
                self._front_end.end(subscription.live)
                continue
            accepting = self._accepting.pop(handle, None)
            if accepting is not None:  # a long prompt is still being tokenized
                accepting.cancel()
                self._fail(handle, RequestCancelled("the request was cancelled"))

    def _fail(self, handle: int, error: ApiError) -> None:
        self._failures.append(generation_pb2.RequestFailed(handle=handle, status=error.to_status()))
        self._turn.set()

    @staticmethod
    def _note(error: Exception) -> str:
        incident = incident_id()
        log.error("multiplexed request failed", incident=incident, exc_info=error)
        return incident

    # -------------------------------------------------------------------------------------------- writing

    async def _write(self) -> None:
        keepalive_s = self._front_end.settings.keepalive_s
        loop = asyncio.get_running_loop()
        written_at = loop.time()
        while self._reading or (self._half_closed and self._is_busy):
            response: generation_pb2.MultiplexResponse | None = None
            try:
                async with asyncio.timeout_at(written_at + keepalive_s):
                    await self._turn.wait()
            except TimeoutError:
                pass
            else:
                early_s = written_at + MIN_INTERVAL_S - loop.time()
                if early_s > 0:
                    await asyncio.sleep(early_s)
                self._turn.clear()
                self.woken = False
                response = self._take()
            # A turn may have nothing to say (requests that answer at the end): that is silence too.
            if response is None and loop.time() - written_at >= keepalive_s:
                response = generation_pb2.MultiplexResponse()
            if response is not None:
                await self._context.write(response)
                written_at = loop.time()

    @property
    def _is_busy(self) -> bool:
        return bool(self._subscriptions or self._accepting or self._failures)

    def _take(self) -> generation_pb2.MultiplexResponse | None:
        """Everything pending, up to the size limit; the rest stays pending."""
        response = generation_pb2.MultiplexResponse()
        columns = _Columns()
        size = 0
        while self._failures and size < MAX_MESSAGE_BYTES // 2:
            response.failures.append(self._failures.popleft())
            size += response.failures[-1].ByteSize()
        for steady in self._news:
            size += columns.add_steady(steady)
        self._news.clear()
        pending, caught_up = list(self._dirty), dict[Subscription, None]()
        self._dirty.clear()
        for index, subscription in enumerate(pending):
            if size >= MAX_MESSAGE_BYTES // 2:
                self._dirty.update(dict.fromkeys(pending[index:]))
                break
            if self._subscriptions.get(subscription.handle) is not subscription:
                continue  # it ended earlier in this very message
            if subscription.is_plain and subscription.started_sent:
                size += columns.add(subscription)
                if not subscription.live.is_over:
                    caught_up[subscription] = None
                    continue
            size += self._take_events(subscription, response)
        if self._dirty or self._failures:
            self._turn.set()
        if len(caught_up) >= MIN_ROWS:
            self._front_end.engine.book.make_columns(self, self._news, caught_up)
        columns.fill(response)
        return response if response.ByteSize() else None

    def _take_events(self, subscription: Subscription, response: generation_pb2.MultiplexResponse) -> int:
        """Adds one request's events; returns their size in bytes."""
        live = subscription.live
        entry = response.events.add(handle=subscription.handle)
        try:
            done = subscription.take(entry.events)
        except TextError as error:
            self._front_end.engine.fail_internally(live, error)
            done = subscription.take(entry.events)
        size = 64 + entry.ByteSize()
        if not entry.events:
            del response.events[-1]
        if done:
            if live.error is not None:
                failure = generation_pb2.RequestFailed(handle=subscription.handle, status=live.error.to_status())
                response.failures.append(failure)
                size += failure.ByteSize()
            del self._subscriptions[subscription.handle]
            self._front_end.release(subscription)
        return size


class _Columns:
    """Plain token deltas of one message."""

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.first_token_indexes: list[int] = []
        self.token_counts: list[int] = []
        self.token_ids: list[int] = []

    def add(self, subscription: Subscription) -> int:
        """Takes a request's new tokens; returns their rough size in bytes. This runs per row and step."""
        tokens = subscription.live.choices[0].log.token_ids
        cursor = subscription.cursors[0]
        first, end = cursor.token_index, len(tokens)
        if first == end:
            return 0
        cursor.token_index = end
        self.handles.append(subscription.handle)
        self.first_token_indexes.append(first)
        self.token_counts.append(end - first)
        if end - first == 1:
            self.token_ids.append(tokens[first])
        else:
            self.token_ids += tokens[first:end]
        return 8 + 3 * (end - first)

    def add_steady(self, steady: SteadyRows) -> int:
        """As `add`, for all rows of a column, with the tokens of every step since the last message."""
        first, token_ids, count = steady.take()
        self.handles += steady.handles
        self.first_token_indexes += first
        self.token_counts += [count] * len(first)
        self.token_ids += token_ids
        return 8 * len(first) + 3 * len(token_ids)

    def fill(self, response: generation_pb2.MultiplexResponse) -> None:
        if not self.handles:
            return
        tokens = response.tokens
        tokens.handles.extend(self.handles)
        tokens.first_token_indexes.extend(self.first_token_indexes)
        tokens.token_ids.extend(self.token_ids)
        if len(self.token_ids) != len(self.handles):
            tokens.token_counts.extend(self.token_counts)
