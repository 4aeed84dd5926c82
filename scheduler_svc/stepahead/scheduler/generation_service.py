"""GenerationService: streams are cursors on output logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import grpc
from typing_extensions import override

from stepahead.scheduler.caller import caller_of
from stepahead.scheduler.errors import FieldViolation, InvalidRequest
from stepahead.scheduler.event_stream import EventStream, Response
from stepahead.scheduler.front_end import FrontEnd
from stepahead.scheduler.guard import Context, guarded
from stepahead.scheduler.live_request import LiveRequest
from stepahead.scheduler.multiplex import MultiplexSession
from stepahead.scheduler.subscription import Events, Subscription
from stepahead.scheduler.text.errors import TextError
from stepahead.v1 import generation_pb2, generation_pb2_grpc

MAX_CANCEL_IDS = 1024

GenerateContext = grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """See the proto for what each call promises."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    @override
    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride] - writes instead of yielding
        self, request: generation_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        await guarded(cast(Context, context), self._generate(request, context))

    async def _generate(self, request: generation_pb2.GenerateRequest, context: GenerateContext) -> None:
        remaining = cast("float | None", context.time_remaining())
        caller = caller_of(cast(Context, context))
        live = await self._front_end.accept(request, caller, time_remaining_s=remaining)
        await self._stream(live, cast(Context, context), generation_pb2.GenerateResponse, ())

    @override
    async def Attach(  # pyright: ignore[reportIncompatibleMethodOverride] - writes instead of yielding
        self,
        request: generation_pb2.AttachRequest,
        context: grpc.aio.ServicerContext[generation_pb2.AttachRequest, generation_pb2.AttachResponse],
    ) -> None:
        await guarded(cast(Context, context), self._attach(request, context))

    async def _attach(
        self,
        request: generation_pb2.AttachRequest,
        context: grpc.aio.ServicerContext[generation_pb2.AttachRequest, generation_pb2.AttachResponse],
    ) -> None:
        self._front_end.engine.finish_turn()
        live = self._front_end.find(request, caller_of(cast(Context, context)))
        make = generation_pb2.AttachResponse
        await self._stream(live, cast(Context, context), make, request.next_token_indexes)

    async def _stream(
        self, live: LiveRequest, context: Context, make: Callable[[], Response], next_token_indexes: Sequence[int]
    ) -> None:
        """Streams a request to its end."""
        stream = EventStream(self._front_end.settings.keepalive_s)
        subscription = self._front_end.subscribe(live, stream, next_token_indexes=next_token_indexes)
        if live.has_news:
            self._front_end.engine.budget.request(stream)
            self._front_end.engine.budget.pump()
        try:
            await context.send_initial_metadata(())
            await stream.run(subscription, context, make, self._take)
        finally:
            # Also the way out when the client is gone: CancelledError at one of the awaits above.
            stream.close()
            self._front_end.release(subscription)

    def _take(self, subscription: Subscription, events: Events) -> bool:
        try:
            return subscription.take(events)
        except TextError as error:
            self._front_end.engine.fail_internally(subscription.live, error)
            return subscription.take(events)

    @override
    async def Cancel(
        self,
        request: generation_pb2.CancelRequest,
        context: grpc.aio.ServicerContext[generation_pb2.CancelRequest, generation_pb2.CancelResponse],
    ) -> generation_pb2.CancelResponse:
        return await guarded(cast(Context, context), self._cancel(request, cast(Context, context)))

    async def _cancel(
        self, request: generation_pb2.CancelRequest, context: Context
    ) -> generation_pb2.CancelResponse:
        if not 1 <= len(request.request_ids) <= MAX_CANCEL_IDS:
            raise InvalidRequest([FieldViolation("request_ids", f"must be 1 to {MAX_CANCEL_IDS} ids")])
        caller = caller_of(context)
        return generation_pb2.CancelResponse(
            outcomes=[self._front_end.cancel(caller, request_id) for request_id in request.request_ids]
        )

    @override
    async def Multiplex(  # pyright: ignore[reportIncompatibleMethodOverride] - writes instead of yielding
        self,
        request_iterator: object,
        context: grpc.aio.ServicerContext[generation_pb2.MultiplexRequest, generation_pb2.MultiplexResponse],
    ) -> None:
        session = MultiplexSession(self._front_end, context)
        await guarded(cast(Context, context), session.run())
