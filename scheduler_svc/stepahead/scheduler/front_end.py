"""What every way in shares: accept a request, find it again, refuse while draining."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import replace

from stepahead.scheduler.caller import Caller
from stepahead.scheduler.cluster import Cluster
from stepahead.scheduler.core import Ordering
from stepahead.scheduler.engine import Engine
from stepahead.scheduler.errors import DuplicateRequest, Unavailable
from stepahead.scheduler.live_request import LiveRequest, RequestTimes, now_ns
from stepahead.scheduler.output_log import OutputLog
from stepahead.scheduler.settings import Settings
from stepahead.scheduler.text.choice_text import ChoiceText
from stepahead.scheduler.validation import AcceptedRequest, validate
from stepahead.v1 import generation_pb2

MAX_REMEMBERED_IDS = 4096
"""Ended requests whose id Cancel still recognises."""


class FrontEnd:
    """The registry of public request ids, and the door."""

    def __init__(self, engine: Engine, cluster: Cluster, settings: Settings) -> None:
        self.engine = engine
        self.cluster = cluster
        self.settings = settings
        self.draining = False
        self.live: dict[tuple[str, str], LiveRequest] = {}
        """By tenant and public id, until the last stream of the request is gone."""
        self.empty = asyncio.Event()
        """Set while no stream is open."""
        self.empty.set()
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def accept(
        self, request: generation_pb2.GenerateRequest, caller: Caller, *, time_remaining_s: float | None
    ) -> LiveRequest:
        """Validates and submits a request, or finds the live one with the same id and body.

        Args:
            request: As received.
            caller: Whose request it is.
            time_remaining_s: Until the call's deadline; None without one.

        Raises:
            ApiError: whatever is wrong.
        """
        if self.draining:
            raise Unavailable("DRAINING", "the server is draining", retry_delay_ms=5000)
        received_ns = now_ns()
        model = self.cluster.require_model()
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        running = self._running(caller, request.request_id, digest)
        if running is not None:
            return running
        accepted = await validate(
            request,
            model,
            default_max_tokens=self.settings.default_max_tokens,
            has_priorities=self.settings.ordering is Ordering.PRIORITY,
        )
        # Tokenizing may have let another request with the same id in.
        running = self._running(caller, accepted.request_id, digest)
        if running is not None:
            return running
        if time_remaining_s is not None:
            accepted = _with_deadline(accepted, time_remaining_s)
        text = None
        if accepted.want_text or accepted.stop_strings:
            assert model.codec is not None, "validated"
            text = ChoiceText(
                model.codec,
                skip_special_tokens=accepted.skip_special_tokens,
                stop_strings=accepted.stop_strings,
                include_stop=accepted.include_stop_in_output,
                min_tokens=accepted.min_tokens,
            )
        live = LiveRequest(
            key=self.engine.mint_key(),
            accepted=accepted,
            digest=digest,
            model_name=model.name,
            tenant=caller.tenant,
            log=OutputLog(text),
            times=RequestTimes(accepted_ns=received_ns),
        )
        self.engine.submit(live)
        self.live[caller.tenant, accepted.request_id] = live
        self.empty.clear()
        return live

    def _running(self, caller: Caller, request_id: str, digest: bytes) -> LiveRequest | None:
        live = self.live.get((caller.tenant, request_id)) if request_id else None
        if live is None or live.finished is not None:
            return None
        if live.digest != digest:
            raise DuplicateRequest(
                f"request_id: {request_id!r} is live with another body", metadata={"request_id": request_id}
            )
        return live

    def release(self, live: LiveRequest) -> None:
        """A stream of the request is gone. Without any other, the request ends (rule F6)."""
        if live.subscriptions:
            return
        self.engine.cancel(live)
        name = (live.tenant, live.accepted.request_id)
        if self.live.get(name) is live:
            del self.live[name]
            if not self.live:
                self.empty.set()
            self._ended[name] = None
            if len(self._ended) > MAX_REMEMBERED_IDS:
                self._ended.popitem(last=False)

    def cancel(self, caller: Caller, request_id: str) -> generation_pb2.CancelOutcome.ValueType:
        """Ends a request of the caller by its public id. Idempotent (rule F3)."""
        name = (caller.tenant, request_id)
        live = self.live.get(name)
        if live is not None and live.finished is None:
            self.engine.cancel(live)
            return generation_pb2.CANCEL_OUTCOME_CANCELLED
        if live is not None or name in self._ended:
            return generation_pb2.CANCEL_OUTCOME_ALREADY_FINISHED
        return generation_pb2.CANCEL_OUTCOME_NOT_FOUND


def _with_deadline(accepted: AcceptedRequest, time_remaining_s: float) -> AcceptedRequest:
    """The call's deadline bounds the request's own timeout."""
    remaining_ms = max(1, int(time_remaining_s * 1000))
    timeout_ms = min(remaining_ms, accepted.timeout_ms or remaining_ms)
    return replace(accepted, timeout_ms=timeout_ms)
