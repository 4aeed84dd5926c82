"""OperationsService: what is going on, drain and resume."""

from __future__ import annotations

import asyncio
from itertools import chain, islice
from typing import cast

import grpc
from typing_extensions import override

from stepahead.scheduler.core import RequestStatus
from stepahead.scheduler.drain import Drainer
from stepahead.scheduler.errors import FieldViolation, InvalidRequest, NotServed, abort
from stepahead.scheduler.front_end import FrontEnd
from stepahead.scheduler.guard import Context, guarded
from stepahead.scheduler.live_request import LiveRequest, now_ns
from stepahead.scheduler.version import package_version
from stepahead.scheduler.worker_link import LinkState, WorkerLink
from stepahead.v1 import operations_pb2, operations_pb2_grpc

MAX_PAGE_SIZE = 1000
MAX_TIMELINE = 4096
_STATES = (RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.WAITING)


class OperationsService(operations_pb2_grpc.OperationsServiceServicer):
    """See the proto for what each call promises."""

    def __init__(self, front_end: FrontEnd, drainer: Drainer) -> None:
        self._front_end = front_end
        self._drainer = drainer
        self._started_ns = now_ns()

    @override
    async def GetStatus(
        self,
        request: operations_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[operations_pb2.GetStatusRequest, operations_pb2.GetStatusResponse],
    ) -> operations_pb2.GetStatusResponse:
        return await guarded(cast(Context, context), self._get_status())

    async def _get_status(self) -> operations_pb2.GetStatusResponse:
        front_end = self._front_end
        front_end.engine.finish_turn()
        core = front_end.engine.core
        totals = front_end.engine.book.totals
        cluster = front_end.cluster
        num_stranded = sum(
            core.lanes[link.lane_id].num_running
            for link in front_end.engine.links.values()
            if link.state is not LinkState.OPEN
        )
        return operations_pb2.GetStatusResponse(
            version=package_version(),
            scheduler_instance_id=cluster.instance_id,
            model=cluster.model.name if cluster.model else "",
            state=self._state(),
            num_waiting=len(core.waiting) + front_end.newcomers.num_waiting + num_stranded,
            num_running=core.num_running - num_stranded,
            workers=[self._worker(link) for link in cluster.links],
            totals=operations_pb2.Totals(
                requests_accepted=totals["accepted"] + len(front_end.newcomers.requests),
                requests_finished=totals["finished"],
                requests_cancelled=totals["cancelled"],
                requests_failed=totals["failed"],
                output_tokens=core.totals.output_tokens,
                prefill_tokens=core.totals.prefill_tokens,
                preemptions=core.totals.preemptions,
                window_replays=core.totals.window_replays,
                approximate_replays=core.totals.approximate_replays,
            ),
            overlap_depth=front_end.settings.overlap_depth,
            uptime_ns=now_ns() - self._started_ns,
        )

    def _state(self) -> operations_pb2.SchedulerState.ValueType:
        if self._front_end.draining:
            return operations_pb2.SCHEDULER_STATE_DRAINING
        if self._front_end.cluster.is_ready:
            return operations_pb2.SCHEDULER_STATE_SERVING
        return operations_pb2.SCHEDULER_STATE_NOT_READY

    def _worker(self, link: WorkerLink) -> operations_pb2.WorkerStatus:
        status = operations_pb2.WorkerStatus(
            address=link.address,
            connected=link.state is LinkState.OPEN,
            worker_instance_id=link.info.worker_instance_id,
            device=link.info.device,
            worker_epoch=link.worker_epoch,
            steps=link.stats.to_proto(),
        )
        lane = self._front_end.engine.core.lanes.get(link.lane_id)
        if lane is None:
            return status
        status.num_running = lane.num_running + len(lane.finishing)
        pools, slots = lane.block_pools, lane.slots
        status.slots.CopyFrom(
            operations_pb2.SlotCounts(
                total=slots.num_total,
                free=slots.num_free,
                owned=slots.num_owned,
                quarantined=slots.num_quarantined,
            )
        )
        status.blocks.CopyFrom(
            operations_pb2.BlockCounts(
                total=sum(pool.num_total for pool in pools),
                free=sum(pool.num_free for pool in pools),
                owned=sum(pool.num_owned for pool in pools),
                cached_idle=sum(pool.num_idle for pool in pools),
                quarantined=sum(pool.num_quarantined for pool in pools),
            )
        )
        status.steps.last_dispatched_step_id = lane.next_step_id - 1
        status.steps.last_committed_step_id = lane.committed_through
        status.steps.overrun_rows = lane.num_overrun_rows
        return status

    @override
    async def ListRequests(
        self,
        request: operations_pb2.ListRequestsRequest,
        context: grpc.aio.ServicerContext[operations_pb2.ListRequestsRequest, operations_pb2.ListRequestsResponse],
    ) -> operations_pb2.ListRequestsResponse:
        return await guarded(cast(Context, context), self._list_requests(request))

    async def _list_requests(
        self, request: operations_pb2.ListRequestsRequest
    ) -> operations_pb2.ListRequestsResponse:
        if request.page_size > MAX_PAGE_SIZE:
            raise InvalidRequest([FieldViolation("page_size", f"is more than {MAX_PAGE_SIZE}")])
        if request.page_token and not (request.page_token.isdecimal() and len(request.page_token) < 20):
            raise InvalidRequest([FieldViolation("page_token", "is not one this server gave out")])
        self._front_end.engine.finish_turn()  # a request whose sequence has ended is not live
        page_size = request.page_size or 100
        after = int(request.page_token or 0)
        # Keys grow with acceptance, so the last key of a page is where the next one begins.
        requests = chain(self._front_end.engine.book.requests.values(), self._front_end.newcomers.requests)
        newer = (live for live in requests if live.key > after)
        page = list(islice(newer, page_size + 1))
        more = len(page) > page_size
        return operations_pb2.ListRequestsResponse(
            requests=[self._request(live) for live in page[:page_size]],
            next_page_token=str(page[page_size - 1].key) if more else "",
        )

    def _request(self, live: LiveRequest) -> operations_pb2.RequestStatus:
        core = self._front_end.engine.core
        keys = [choice.key for choice in live.choices if choice.finished is None]
        # Newcomers while there is no worker are unknown to the core.
        sequences = [core.sequences[key] for key in keys if key in core.sequences]
        # Of several choices the one that is furthest speaks for the request.
        sequence = min(sequences, key=lambda sequence: _STATES.index(sequence.status), default=None)
        state = RequestStatus.WAITING if sequence is None else sequence.status
        stay = None if sequence is None else sequence.stay
        link = self._front_end.engine.links.get(stay.lane_id) if stay is not None else None
        if link is not None and link.state is not LinkState.OPEN:
            state = RequestStatus.WAITING
        return operations_pb2.RequestStatus(
            request_id=live.accepted.request_id,
            state=state.value,
            prompt_tokens=len(live.accepted.prompt_token_ids),
            output_tokens=live.num_output_tokens,
            age_ns=now_ns() - live.times.accepted_ns,
            worker_address=link.address if link is not None else "",
        )

    @override
    async def Drain(
        self,
        request: operations_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[operations_pb2.DrainRequest, operations_pb2.DrainResponse],
    ) -> operations_pb2.DrainResponse:
        return await guarded(cast(Context, context), self._drain(request))

    async def _drain(self, request: operations_pb2.DrainRequest) -> operations_pb2.DrainResponse:
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else None
        # A client that goes away does not undo its drain.
        result = await asyncio.shield(asyncio.ensure_future(self._drainer.drain(timeout_s)))
        return operations_pb2.DrainResponse(finished=result.num_finished, cancelled=result.num_cancelled)

    @override
    async def Resume(
        self,
        request: operations_pb2.ResumeRequest,
        context: grpc.aio.ServicerContext[operations_pb2.ResumeRequest, operations_pb2.ResumeResponse],
    ) -> operations_pb2.ResumeResponse:
        return await guarded(cast(Context, context), self._resume())

    async def _resume(self) -> operations_pb2.ResumeResponse:
        self._drainer.resume()
        return operations_pb2.ResumeResponse()

    @override
    async def GetTimeline(
        self,
        request: operations_pb2.GetTimelineRequest,
        context: grpc.aio.ServicerContext[operations_pb2.GetTimelineRequest, operations_pb2.GetTimelineResponse],
    ) -> operations_pb2.GetTimelineResponse:
        return await guarded(cast(Context, context), self._get_timeline(request))

    async def _get_timeline(self, request: operations_pb2.GetTimelineRequest) -> operations_pb2.GetTimelineResponse:
        if request.limit > MAX_TIMELINE:
            raise InvalidRequest([FieldViolation("limit", f"is more than {MAX_TIMELINE}")])
        self._front_end.engine.finish_turn()
        links = self._front_end.cluster.links
        wanted = request.worker_address
        link = next((link for link in links if not wanted or link.address == wanted), None)
        if link is None:
            raise InvalidRequest([FieldViolation("worker_address", f"no worker {wanted!r} is configured")])
        return operations_pb2.GetTimelineResponse(records=link.stats.timeline(request.limit or 256))

    @override
    async def FlushSteps(
        self,
        request: operations_pb2.FlushStepsRequest,
        context: grpc.aio.ServicerContext[operations_pb2.FlushStepsRequest, operations_pb2.FlushStepsResponse],
    ) -> operations_pb2.FlushStepsResponse:
        return await guarded(cast(Context, context), self._flush_steps())

    async def _flush_steps(self) -> operations_pb2.FlushStepsResponse:
        links = list(self._front_end.cluster.links)
        num_before = sum(link.stats.num_boundaries for link in links)
        await asyncio.gather(*(link.flush() for link in links))
        num_after = sum(link.stats.num_boundaries for link in links)
        return operations_pb2.FlushStepsResponse(num_boundaries=num_after - num_before)

    @override
    async def CordonWorker(
        self,
        request: operations_pb2.CordonWorkerRequest,
        context: grpc.aio.ServicerContext[operations_pb2.CordonWorkerRequest, operations_pb2.CordonWorkerResponse],
    ) -> operations_pb2.CordonWorkerResponse:
        await abort(cast(Context, context), [NotServed("CordonWorker is not served yet")])

    @override
    async def UncordonWorker(
        self,
        request: operations_pb2.UncordonWorkerRequest,
        context: grpc.aio.ServicerContext[
            operations_pb2.UncordonWorkerRequest, operations_pb2.UncordonWorkerResponse
        ],
    ) -> operations_pb2.UncordonWorkerResponse:
        await abort(cast(Context, context), [NotServed("UncordonWorker is not served yet")])
