"""What every way in shares: accept a request, find it again, keep it for who comes back, refuse while draining."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from stepahead.scheduler.caller import Caller
from stepahead.scheduler.cluster import Cluster
from stepahead.scheduler.constraints.compiler import CompiledConstraint
from stepahead.scheduler.constraints.errors import (
    ConstraintBusy,
    ConstraintInvalid,
    ConstraintUnavailable,
    ConstraintUnsupported,
)
from stepahead.scheduler.constraints.spec import ConstraintSpec
from stepahead.scheduler.core import FinishReason, Ordering
from stepahead.scheduler.delivery import StreamWriter
from stepahead.scheduler.engine import Engine
from stepahead.scheduler.errors import (
    ApiError,
    DuplicateRequest,
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestCancelled,
    Unavailable,
)
from stepahead.scheduler.live_request import Choice, LiveRequest, RequestTimes, now_ns
from stepahead.scheduler.newcomers import Name, Newcomers
from stepahead.scheduler.output_log import MakeText, OutputLog
from stepahead.scheduler.served_model import ServedModel
from stepahead.scheduler.settings import Settings
from stepahead.scheduler.subscription import Subscription
from stepahead.scheduler.text.choice_text import ChoiceText
from stepahead.scheduler.text.stop_strings import StopStrings
from stepahead.scheduler.validation import AcceptedRequest, validate
from stepahead.v1 import generation_pb2

MAX_REMEMBERED_IDS = 4096
"""Ended requests whose id Cancel still recognises."""
MAX_RETAINED = 1024
"""Ended requests whose answer waits for somebody to come back for it; the oldest go first."""


class FrontEnd:
    """The registry of public request ids, and the door."""

    def __init__(self, engine: Engine, cluster: Cluster, settings: Settings) -> None:
        self.engine = engine
        self.cluster = cluster
        self.settings = settings
        self.newcomers = Newcomers(engine, settings)
        self.draining = False
        """Whether nothing new is accepted."""
        self.live: dict[Name, LiveRequest] = {}
        """Until the last stream of the request is gone and nobody may come back for it."""
        self.empty = asyncio.Event()
        """Set while no stream is open."""
        self.empty.set()
        self._num_streams = 0
        self._leaving: OrderedDict[Name, asyncio.TimerHandle] = OrderedDict()
        """Requests without a stream, oldest first, and what ends them."""
        self._ended: OrderedDict[Name, None] = OrderedDict()
        self._accepting: Counter[Name] = Counter()
        """Requests whose prompt is being tokenized or whose constraint is being compiled."""
        self._cancelled_early: set[Name] = set()
        """Those among them that a Cancel has named (rule F1)."""

    @property
    def unended(self) -> list[LiveRequest]:
        """Accepted requests that have not ended: in the core, and waiting for a worker."""
        return [*self.engine.book.requests.values(), *self.newcomers.requests]

    # -------------------------------------------------------------------------------------------- ways in

    async def accept(
        self, request: generation_pb2.GenerateRequest, caller: Caller, *, time_remaining_s: float | None
    ) -> LiveRequest:
        """Validates and submits a request, or finds the one with the same id and body. `subscribe` must follow.

        Args:
            request: As received.
            caller: Whose request it is.
            time_remaining_s: Until the call's deadline; None without one.

        Raises:
            ApiError: whatever is wrong.
        """
        if self.draining:
            raise _draining()
        name = (caller.tenant, request.request_id)
        self._accepting[name] += 1
        try:
            return await self._accept(request, caller, time_remaining_s)
        finally:
            self._accepting[name] -= 1
            if not self._accepting[name]:
                del self._accepting[name]
                self._cancelled_early.discard(name)

    async def _accept(
        self, request: generation_pb2.GenerateRequest, caller: Caller, time_remaining_s: float | None
    ) -> LiveRequest:
        received_ns = now_ns()
        model = self.cluster.require_model()
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        known = self._known(caller, request.request_id, digest)
        if known is not None:
            return known
        accepted = await validate(
            request,
            model,
            default_max_tokens=self.settings.default_max_tokens,
            has_priorities=self.settings.ordering is Ordering.PRIORITY,
        )
        compiled = await self._compile(accepted.constraint) if accepted.constraint is not None else None
        if time_remaining_s is not None:
            accepted = _with_deadline(accepted, time_remaining_s)
        # Tokenizing and compiling may have let another request with the same id in.
        known = self._known(caller, accepted.request_id, digest)
        if known is not None:
            return known
        if self.draining:
            raise _draining()
        if (caller.tenant, request.request_id) in self._cancelled_early:
            raise RequestCancelled("the request was cancelled before it was accepted")
        make_text = text_maker(accepted, model)
        live = LiveRequest(
            accepted=accepted,
            choices=tuple(
                Choice(key=self.engine.mint_key(), index=index, log=OutputLog(make_text))
                for index in range(accepted.num_choices)
            ),
            digest=digest,
            model_name=model.name,
            tenant=caller.tenant,
            times=RequestTimes(accepted_ns=received_ns),
        )
        if self.engine.links:
            self.engine.submit(live, compiled)
        else:
            self.newcomers.add(live, compiled)
        name = (caller.tenant, accepted.request_id)
        self._forget(name)  # an ended request whose id is used again
        self.live[name] = live
        return live

    async def _compile(self, spec: ConstraintSpec) -> CompiledConstraint:
        """The grammar, before anything is promised: a bad one is the client's error (rule I6)."""
        compiler = self.cluster.compiler
        assert compiler is not None, "validated: the model has a tokenizer"
        try:
            return await compiler.compile(spec)
        except ConstraintInvalid as error:
            raise InvalidRequest([FieldViolation(error.field, error.description)]) from error
        except ConstraintBusy as error:
            raise Overloaded(str(error), retry_delay_ms=1000) from error
        except ConstraintUnsupported as error:
            raise InvalidRequest(
                [FieldViolation("constraint", f"the model cannot be constrained: {error}")]
            ) from error
        except ConstraintUnavailable as error:
            raise Unavailable("CONSTRAINTS_UNAVAILABLE", f"constraint: {error}") from error

    def _known(self, caller: Caller, request_id: str, digest: bytes) -> LiveRequest | None:
        """The request with this id, if this is the same one. An id of an ended request may be used again (F7)."""
        live = self.live.get((caller.tenant, request_id)) if request_id else None
        if live is None or (live.is_over and live.digest != digest):
            return None
        if live.digest != digest:
            raise DuplicateRequest(
                f"request_id: {request_id!r} is live with another body", metadata={"request_id": request_id}
            )
        if live.is_over and not live.accepted.reattach_window_ms:
            return None  # its terminal was sent: this is a request of its own
        return live

    def find(self, request: generation_pb2.AttachRequest, caller: Caller) -> LiveRequest:
        """The request to attach to. `subscribe` must follow.

        Raises:
            NotFound: there is none of this caller's, or it is gone.
            InvalidRequest: it has not said that much.
        """
        live = self.live.get((caller.tenant, request.request_id))
        if live is None:
            text = f"request_id: no live or kept request {request.request_id[:128]!r}"
            raise NotFound("request", request.request_id[:128], text)
        indexes = request.next_token_indexes
        if len(indexes) > len(live.choices):
            text = f"{len(indexes)} entries for {len(live.choices)} choices"
            raise InvalidRequest([FieldViolation("next_token_indexes", text)])
        for index, (wanted, choice) in enumerate(zip(indexes, live.choices, strict=False)):
            made = len(choice.log.token_ids)
            if wanted > made:
                text = f"{wanted} is beyond the {made} tokens there are"
                raise InvalidRequest([FieldViolation(f"next_token_indexes[{index}]", text)])
        return live

    # -------------------------------------------------------------------------------------------- streams

    def subscribe(
        self,
        live: LiveRequest,
        writer: StreamWriter,
        *,
        handle: int = 0,
        dirty: dict[Subscription, None] | None = None,
        next_token_indexes: Sequence[int] = (),
    ) -> Subscription:
        """Gives a request a stream; see `Subscription`. `release` must follow."""
        subscription = Subscription(live, writer, handle=handle, dirty=dirty, next_token_indexes=next_token_indexes)
        leaving = self._leaving.pop(_name_of(live), None)
        if leaving is not None:
            leaving.cancel()
        self._num_streams += 1
        self.empty.clear()
        return subscription

    def release(self, subscription: Subscription) -> None:
        """A stream of a request is gone. Without any other the request ends (rule F6), in its window's time."""
        live = subscription.live
        subscription.close()
        self._num_streams -= 1
        if not self._num_streams:
            self.empty.set()
        if live.subscriptions:
            return
        name, window_ms = _name_of(live), live.accepted.reattach_window_ms
        if not window_ms or self.live.get(name) is not live:
            self._give_up(live)
            return
        loop = asyncio.get_running_loop()
        self._leaving[name] = loop.call_later(window_ms / 1000, self._give_up, live)
        if len(self._leaving) > MAX_RETAINED:
            self._forget_oldest_ended()

    def _forget_oldest_ended(self) -> None:
        """Requests that run are never dropped for want of room."""
        name = next((name for name in self._leaving if self.live[name].is_over), None)
        if name is not None:
            self._forget(name)

    def _give_up(self, live: LiveRequest) -> None:
        self.end(live)
        name = _name_of(live)
        if self.live.get(name) is live:
            self._forget(name)

    def _forget(self, name: Name) -> None:
        live = self.live.pop(name, None)
        if live is None:
            return
        if live.is_over:
            live.part()
        leaving = self._leaving.pop(name, None)
        if leaving is not None:
            leaving.cancel()
        self._ended[name] = None
        if len(self._ended) > MAX_REMEMBERED_IDS:
            self._ended.popitem(last=False)

    def end(self, live: LiveRequest, error: ApiError | None = None) -> None:
        """Ends a request, wherever it is: with `error`, or as cancelled. Harmless if it has ended."""
        reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
        if not self.newcomers.end(live, error or RequestCancelled("the request was cancelled"), reason):
            self.engine.cancel(live, error)

    def cancel(self, caller: Caller, request_id: str) -> generation_pb2.CancelOutcome.ValueType:
        """Ends a request of the caller by its public id, and what was kept of it. Idempotent (rule F3)."""
        name = (caller.tenant, request_id)
        live = self.live.get(name)
        if live is None and request_id and name in self._accepting:
            self._cancelled_early.add(name)
            return generation_pb2.CANCEL_OUTCOME_CANCELLED
        if live is None:
            known = name in self._ended
            return (
                generation_pb2.CANCEL_OUTCOME_ALREADY_FINISHED if known else generation_pb2.CANCEL_OUTCOME_NOT_FOUND
            )
        was_over = live.is_over
        self.end(live)
        if not live.subscriptions:
            self._forget(name)
        return (
            generation_pb2.CANCEL_OUTCOME_ALREADY_FINISHED if was_over else generation_pb2.CANCEL_OUTCOME_CANCELLED
        )


def _draining() -> Unavailable:
    return Unavailable("DRAINING", "the server is draining", retry_delay_ms=5000)


def _name_of(live: LiveRequest) -> Name:
    return (live.tenant, live.accepted.request_id)


def text_maker(accepted: AcceptedRequest, model: ServedModel) -> MakeText | None:
    """What makes the decoder of one choice; None: the request needs no text."""
    if not (accepted.want_text or accepted.stop_strings):
        return None
    codec, stops = model.codec, StopStrings(accepted.stop_strings)
    assert codec is not None, "validated"
    return lambda: ChoiceText(
        codec,
        skip_special_tokens=accepted.skip_special_tokens,
        stop_strings=stops,
        include_stop=accepted.include_stop_in_output,
        min_tokens=accepted.min_tokens,
    )


def _with_deadline(accepted: AcceptedRequest, time_remaining_s: float) -> AcceptedRequest:
    """The call's deadline bounds the request's own timeout; one that may outlive its call keeps its own."""
    if accepted.reattach_window_ms:
        return accepted
    remaining_ms = max(1, int(time_remaining_s * 1000))
    timeout_ms = min(remaining_ms, accepted.timeout_ms or remaining_ms)
    return replace(accepted, timeout_ms=timeout_ms)
