"""Protocol messages to the SDK's values, and nothing else."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeVar

from stepahead.client.errors import ProtocolError
from stepahead.client.status import (
    BlockCounts,
    SchedulerState,
    ServerStatus,
    SlotCounts,
    StepStats,
    Totals,
    WorkerStatus,
)
from stepahead.client.values import (
    ApiLimits,
    CancelOutcome,
    FinishReason,
    ModelInfo,
    Phase,
    Sampling,
    Started,
    Stopping,
    Timings,
    TokenLogprob,
    Usage,
)
from stepahead.v1 import generation_pb2, operations_pb2

_T = TypeVar("_T")

_FINISH_REASONS: Mapping[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    generation_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}
_CANCEL_OUTCOMES: Mapping[int, CancelOutcome] = {
    generation_pb2.CANCEL_OUTCOME_CANCELLED: CancelOutcome.CANCELLED,
    generation_pb2.CANCEL_OUTCOME_ALREADY_FINISHED: CancelOutcome.ALREADY_FINISHED,
    generation_pb2.CANCEL_OUTCOME_NOT_FOUND: CancelOutcome.NOT_FOUND,
}
_PHASES: Mapping[int, Phase] = {
    generation_pb2.Keepalive.PHASE_QUEUED: Phase.QUEUED,
    generation_pb2.Keepalive.PHASE_PREFILL: Phase.PREFILL,
    generation_pb2.Keepalive.PHASE_DECODE: Phase.DECODE,
}
_SCHEDULER_STATES: Mapping[int, SchedulerState] = {
    operations_pb2.SCHEDULER_STATE_NOT_READY: SchedulerState.NOT_READY,
    operations_pb2.SCHEDULER_STATE_SERVING: SchedulerState.SERVING,
    operations_pb2.SCHEDULER_STATE_DRAINING: SchedulerState.DRAINING,
}


def finish_reason(number: int) -> FinishReason:
    """The reason of a ChoiceFinished. Raises ProtocolError for a number this client does not know."""
    return _known(_FINISH_REASONS, number, "finish reason")


def cancel_outcome(number: int) -> CancelOutcome:
    """One outcome of Cancel. Raises ProtocolError for a number this client does not know."""
    return _known(_CANCEL_OUTCOMES, number, "cancel outcome")


def phase(number: int) -> Phase:
    """The phase of a Keepalive. Raises ProtocolError for a number this client does not know."""
    return _known(_PHASES, number, "keepalive phase")


def _known(table: Mapping[int, _T], number: int, what: str) -> _T:
    value = table.get(number)
    if value is None:
        raise ProtocolError(f"unknown {what} {number}")
    return value


def sampling(message: generation_pb2.SamplingParams) -> Sampling:
    """Sampling parameters; unset fields become None."""
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        seed=message.seed if message.HasField("seed") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
        frequency_penalty=message.frequency_penalty if message.HasField("frequency_penalty") else None,
        presence_penalty=message.presence_penalty if message.HasField("presence_penalty") else None,
        logit_bias=tuple((each.token_id, each.bias) for each in message.logit_bias),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        allowed_token_ids=tuple(message.allowed_token_ids),
    )


def stopping(message: generation_pb2.StoppingParams) -> Stopping:
    """Stopping parameters; unset fields become None."""
    return Stopping(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        stop=tuple(message.stop_strings),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else None,
        include_stop_in_output=(
            message.include_stop_in_output if message.HasField("include_stop_in_output") else None
        ),
    )


def started(message: generation_pb2.Started) -> Started:
    """The admission event."""
    return Started(
        request_id=message.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        queue_ns=message.queue_ns,
        sampling=sampling(message.applied_sampling),
        stopping=stopping(message.applied_stopping),
    )


def token_logprobs(
    columns: generation_pb2.LogprobColumns, token_ids: Sequence[int | None]
) -> tuple[TokenLogprob, ...]:
    """Columns to one value per token, of the given ids. Raises ProtocolError if lengths differ."""
    counts = columns.top_counts
    if not len(columns.token_logprobs) == len(columns.ranks) == len(counts) == len(token_ids) or not len(
        columns.top_token_ids
    ) == len(columns.top_logprobs) == sum(counts):
        raise ProtocolError("the columns of log probabilities have different lengths")
    best = zip(columns.top_token_ids, columns.top_logprobs, strict=True)
    return tuple(
        TokenLogprob(token_id, logprob, rank, tuple(islice(best, count)))
        for token_id, logprob, rank, count in zip(
            token_ids, columns.token_logprobs, columns.ranks, counts, strict=True
        )
    )


def usage(message: generation_pb2.Usage) -> Usage:
    """Token counts."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        output_tokens=message.output_tokens,
    )


def timings(message: generation_pb2.Timings) -> Timings:
    """Durations."""
    return Timings(
        queue_ns=message.queue_ns,
        first_token_ns=message.first_token_ns,
        decode_ns=message.decode_ns,
        total_ns=message.total_ns,
        preemptions=message.preemptions,
    )


def model_info(message: generation_pb2.GetModelResponse) -> ModelInfo:
    """The served model."""
    limits = message.limits
    return ModelInfo(
        model=message.model,
        fingerprint=message.fingerprint,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        has_chat_template=message.has_chat_template,
        has_tokenizer=message.has_tokenizer,
        tokenizer_sha256=message.tokenizer_sha256,
        default_sampling=sampling(message.default_sampling),
        limits=ApiLimits(
            default_max_tokens=limits.default_max_tokens,
            max_stop_strings=limits.max_stop_strings,
            max_stop_string_bytes=limits.max_stop_string_bytes,
            max_stop_token_ids=limits.max_stop_token_ids,
            max_num_choices=limits.max_num_choices,
            max_prompt_bytes=limits.max_prompt_bytes,
            max_waiting_requests=limits.max_waiting_requests,
        ),
    )


def server_status(message: operations_pb2.GetStatusResponse) -> ServerStatus:
    """Everything at a glance."""
    totals = message.totals
    return ServerStatus(
        version=message.version,
        scheduler_instance_id=message.scheduler_instance_id,
        model=message.model,
        state=_known(_SCHEDULER_STATES, message.state, "scheduler state"),
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        overlap_depth=message.overlap_depth,
        uptime_ns=message.uptime_ns,
        totals=Totals(
            requests_accepted=totals.requests_accepted,
            requests_finished=totals.requests_finished,
            requests_cancelled=totals.requests_cancelled,
            requests_failed=totals.requests_failed,
            output_tokens=totals.output_tokens,
            prefill_tokens=totals.prefill_tokens,
            preemptions=totals.preemptions,
            window_replays=totals.window_replays,
            approximate_replays=totals.approximate_replays,
        ),
        workers=tuple(_worker_status(worker) for worker in message.workers),
    )


def _worker_status(message: operations_pb2.WorkerStatus) -> WorkerStatus:
    slots, blocks = message.slots, message.blocks
    return WorkerStatus(
        address=message.address,
        connected=message.connected,
        worker_instance_id=message.worker_instance_id,
        device=message.device,
        worker_epoch=message.worker_epoch,
        num_running=message.num_running,
        slots=SlotCounts(total=slots.total, free=slots.free, owned=slots.owned, quarantined=slots.quarantined),
        blocks=BlockCounts(
            total=blocks.total,
            free=blocks.free,
            owned=blocks.owned,
            cached_idle=blocks.cached_idle,
            quarantined=blocks.quarantined,
        ),
        steps=_step_stats(message.steps),
    )


def _step_stats(message: operations_pb2.StepStats) -> StepStats:
    return StepStats(
        last_dispatched_step_id=message.last_dispatched_step_id,
        last_committed_step_id=message.last_committed_step_id,
        boundaries_with_running_step=message.boundaries_with_running_step,
        boundaries=message.boundaries,
        busy_ns=message.busy_ns,
        idle_ns=message.idle_ns,
        gap_ns_p50=message.gap_ns_p50,
        gap_ns_p99=message.gap_ns_p99,
        boundary_to_plan_ns_p50=message.boundary_to_plan_ns_p50,
        boundary_to_plan_ns_p99=message.boundary_to_plan_ns_p99,
        resumes=message.resumes,
        overrun_rows=message.overrun_rows,
    )
