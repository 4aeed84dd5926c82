# ruff: noqa: N802 - the generated servicers name their methods after the calls
"""A scriptable stand-in for the scheduler's public services.

A test sets `generate` (`attach`, `multiplex`) to a generator function; unary calls answer from attributes. It is
a threaded server on purpose: blocking and asyncio clients are tested against the same one, in a process
with one event loop.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from stepahead.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
)

AttachScript = Callable[
    [generation_pb2.AttachRequest, grpc.ServicerContext], Iterator[generation_pb2.AttachResponse]
]
Script = Callable[[generation_pb2.GenerateRequest, grpc.ServicerContext], Iterator[generation_pb2.GenerateResponse]]
WAIT_S = 30.0


def started(request_id: str = "r1", prompt_tokens: int = 3, **stopping: Any) -> generation_pb2.GenerationEvent:
    return generation_pb2.GenerationEvent(
        started=generation_pb2.Started(
            request_id=request_id,
            model="fake",
            prompt_tokens=prompt_tokens,
            queue_ns=5,
            applied_sampling=generation_pb2.SamplingParams(temperature=0.0, seed=2**64 - 1),
            applied_stopping=generation_pb2.StoppingParams(**stopping),
        )
    )


def delta(
    first: int,
    ids: Sequence[int],
    text: str = "",
    choice: int = 0,
    logprobs: generation_pb2.LogprobColumns | None = None,
) -> generation_pb2.GenerationEvent:
    return generation_pb2.GenerationEvent(
        delta=generation_pb2.TokenDelta(
            choice_index=choice, first_token_index=first, token_ids=ids, text=text, logprobs=logprobs
        )
    )


def columns(*entries: tuple[float, int, list[tuple[int, float]]]) -> generation_pb2.LogprobColumns:
    """Entries of (log probability, rank, best ones) as columns."""
    return generation_pb2.LogprobColumns(
        token_logprobs=[logprob for logprob, _, _ in entries],
        ranks=[rank for _, rank, _ in entries],
        top_counts=[len(top) for _, _, top in entries],
        top_token_ids=[token_id for _, _, top in entries for token_id, _ in top],
        top_logprobs=[logprob for _, _, top in entries for _, logprob in top],
    )


def prompt_logprobs(
    first: int, *entries: tuple[float, int, list[tuple[int, float]]]
) -> generation_pb2.GenerationEvent:
    return generation_pb2.GenerationEvent(
        prompt_logprobs=generation_pb2.PromptLogprobs(first_position=first, logprobs=columns(*entries))
    )


def keepalive(phase: generation_pb2.Keepalive.Phase) -> generation_pb2.GenerationEvent:
    return generation_pb2.GenerationEvent(keepalive=generation_pb2.Keepalive(phase=phase))


def choice_finished(
    output_tokens: int,
    reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_LENGTH,
    choice: int = 0,
    **matched: Any,
) -> generation_pb2.GenerationEvent:
    return generation_pb2.GenerationEvent(
        choice_finished=generation_pb2.ChoiceFinished(
            choice_index=choice, reason=reason, output_tokens=output_tokens, **matched
        )
    )


def finished(output_tokens: int, prompt_tokens: int = 3) -> generation_pb2.GenerationEvent:
    return generation_pb2.GenerationEvent(
        finished=generation_pb2.GenerationFinished(
            usage=generation_pb2.Usage(prompt_tokens=prompt_tokens, output_tokens=output_tokens),
            timings=generation_pb2.Timings(
                queue_ns=1_000_000, first_token_ns=2_000_000, decode_ns=8_000_000, total_ns=10_000_000
            ),
        )
    )


def response(*events: generation_pb2.GenerationEvent) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(events=events)


def small_steps(
    request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[generation_pb2.GenerateResponse]:
    """An answer in four messages, its text lagging its tokens."""
    yield response(keepalive(generation_pb2.Keepalive.PHASE_QUEUED))
    yield response(started(request.request_id or "r1"), delta(0, [1], "Small"))
    yield response(delta(1, [2, 3], " steps"))
    yield response(
        delta(3, [], " help"),
        choice_finished(3, generation_pb2.FINISH_REASON_STOP, stop_string="."),
        finished(3),
    )


def packed(*details: Message) -> list[any_pb2.Any]:
    packed_details = []
    for detail in details:
        each = any_pb2.Any()
        each.Pack(detail)
        packed_details.append(each)
    return packed_details


def violation(field: str, description: str = "is wrong") -> status_pb2.Status:
    bad_request = error_details_pb2.BadRequest()
    bad_request.field_violations.add(field=field, description=description)
    return status_pb2.Status(
        code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
        message=f"{field} {description}",
        details=packed(bad_request, error_details_pb2.ErrorInfo(reason="BAD_FIELD", metadata={"limit": "8"})),
    )


def retry_status(code: grpc.StatusCode, delay_ms: int) -> status_pb2.Status:
    delay = duration_pb2.Duration(nanos=delay_ms * 1_000_000)
    return status_pb2.Status(
        code=code.value[0],
        message="try later",
        details=packed(error_details_pb2.RetryInfo(retry_delay=delay)),
    )


def failing(status: status_pb2.Status, *before: generation_pb2.GenerateResponse) -> Script:
    """A script that sends `before` and then ends with an error status."""

    def script(
        request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        yield from before
        context.abort_with_status(rpc_status.to_status(status))

    return script


def broken(*before: generation_pb2.GenerateResponse) -> Script:
    """A script that sends `before` and then breaks as a lost connection does: UNAVAILABLE without details."""
    return failing(status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="Socket closed"), *before)


def unknown_request(
    request: generation_pb2.AttachRequest, context: grpc.ServicerContext
) -> Iterator[generation_pb2.AttachResponse]:
    context.abort(grpc.StatusCode.NOT_FOUND, "no such request")


def default_status() -> operations_pb2.GetStatusResponse:
    status = operations_pb2.GetStatusResponse(
        version="0.1.0", model="fake", state=operations_pb2.SCHEDULER_STATE_SERVING, overlap_depth=1
    )
    worker = status.workers.add(address="127.0.0.1:1", connected=True, device="cpu")
    worker.slots.total = 64
    worker.slots.free = 64
    worker.blocks.total = 100
    worker.blocks.free = 100
    worker.steps.boundaries = 4
    worker.steps.boundaries_with_running_step = 3
    worker.steps.busy_ns = 2**40
    return status


class FakeServer(
    generation_pb2_grpc.GenerationServiceServicer,
    generation_pb2_grpc.ModelServiceServicer,
    operations_pb2_grpc.OperationsServiceServicer,
):
    """The services; `address` is where they listen."""

    def __init__(self) -> None:
        self.generate: Script = small_steps
        self.multiplex: Callable[[Any, grpc.ServicerContext], Iterator[generation_pb2.MultiplexResponse]]
        self.attach: AttachScript = unknown_request
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.attaches: list[generation_pb2.AttachRequest] = []
        self.cancelled_ids: list[str] = []
        self.deadlines_s: list[float | None] = []
        self.status = default_status()
        self.call_ended = threading.Event()
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=16), options=[("grpc.so_reuseport", 0)])
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        generation_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
        operations_pb2_grpc.add_OperationsServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait(WAIT_S)

    def wait_for_requests(self, count: int) -> None:
        """Returns once so many generations have been asked for."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.requests) >= count, WAIT_S)

    def hang_after(self, *before: generation_pb2.GenerateResponse) -> None:
        """Makes every generation send `before` and then wait until the client leaves."""

        def script(
            request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
        ) -> Iterator[generation_pb2.GenerateResponse]:
            yield from before
            self.call_ended.wait(WAIT_S)

        self.generate = script

    def Generate(self, request, context):
        with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()
        self.deadlines_s.append(context.time_remaining())
        context.add_callback(self.call_ended.set)
        yield from self.generate(request, context)

    def Attach(self, request, context):
        self.attaches.append(request)
        yield from self.attach(request, context)

    def Multiplex(self, request_iterator, context):
        context.add_callback(self.call_ended.set)
        yield from self.multiplex(request_iterator, context)

    def Cancel(self, request, context):
        self.cancelled_ids += request.request_ids
        outcomes = [
            generation_pb2.CANCEL_OUTCOME_CANCELLED
            if request_id == "live"
            else generation_pb2.CANCEL_OUTCOME_NOT_FOUND
            for request_id in request.request_ids
        ]
        return generation_pb2.CancelResponse(outcomes=outcomes)

    def GetModel(self, request, context):
        if request.model not in ("", "fake"):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model}")
        return generation_pb2.GetModelResponse(
            model="fake",
            vocab_size=5,
            max_model_len=64,
            eos_token_ids=[4],
            default_sampling=generation_pb2.SamplingParams(temperature=1.0),
            limits=generation_pb2.ApiLimits(default_max_tokens=16),
        )

    def Tokenize(self, request, context):
        text = request.text or "".join(message.content for message in request.chat.messages)
        return generation_pb2.TokenizeResponse(token_ids=[ord(character) for character in text])

    def Detokenize(self, request, context):
        return generation_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def GetStatus(self, request, context):
        return self.status
