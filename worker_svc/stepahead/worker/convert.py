"""Worker values to protocol messages, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepahead.v1 import worker_pb2
from stepahead.worker.cache_sizing import cache_bytes
from stepahead.worker.runner import SampleStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepahead.worker.runner import CacheShape, ModelFacts, RowLogprobs, StepSamples
    from stepahead.worker.step import Step
    from stepahead.worker.step_batch import StepRows

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1
"""1: penalties, bans, log probabilities and KV groups."""

MAX_BUNDLE_CHUNK_BYTES = 1 << 20


def boundary_message(step: Step) -> worker_pb2.RunStepsResponse:
    """The boundary of a step that has ended. `send_delay_ns` is left for the writer."""
    message = worker_pb2.RunStepsResponse()
    boundary = message.boundary
    boundary.worker_epoch = step.worker_epoch
    boundary.completed_step_id = step.step_id
    boundary.running_step_id = step.running_step_id
    boundary.queued_steps = step.queued_steps
    boundary.gap_ns = step.gap_ns
    completion = boundary.completion
    if step.batch is None or step.rows is None or step.samples is None:
        completion.SetInParent()
        return message
    completion.slots.extend(step.rows.slots)
    completion.incarnations.extend(step.rows.incarnations)
    sampled = step.samples.status == SampleStatus.OK
    if len(sampled) == len(step.rows.slots) and sampled.all():
        completion.token_ids.extend(step.samples.token_ids.tolist())
    else:
        counts = np.zeros(len(step.rows.slots), np.int64)
        counts[step.rows.sample_rows[sampled]] = 1
        completion.token_counts.extend(counts.tolist())
        completion.token_ids.extend(step.samples.token_ids[sampled].tolist())
        _add_row_errors(completion, step)
    for trace in step.samples.traces:
        completion.row_traces.add(
            slot=step.rows.slots[trace.row],
            incarnation=step.rows.incarnations[trace.row],
            num_additions=trace.num_additions,
            inputs=trace.inputs,
        )
    _add_logprobs(completion, step.rows, step.samples)
    timings = completion.timings
    timings.launch_ns = step.launched_ns - step.read_ns
    timings.forward_ns = step.forward_ended_ns - step.started_ns
    timings.sample_wait_ns = step.sample_started_ns - step.forward_ended_ns
    timings.sample_ns = step.ended_ns - step.sample_started_ns
    return message


def _add_logprobs(completion: worker_pb2.StepCompletion, rows: StepRows, samples: StepSamples) -> None:
    if samples.output_logprobs is not None:
        _fill_logprobs(completion.output_logprobs, rows, samples.output_logprobs)
    if samples.prompt_logprobs is not None:
        _fill_logprobs(completion.prompt_logprobs, rows, samples.prompt_logprobs)


def _fill_logprobs(message: worker_pb2.TokenLogprobs, rows: StepRows, logprobs: RowLogprobs) -> None:
    entries = logprobs.entries
    row_list: list[int] = logprobs.rows.tolist()
    message.slots.extend(rows.slots[row] for row in row_list)
    message.incarnations.extend(rows.incarnations[row] for row in row_list)
    message.first_positions.extend(logprobs.first_positions.tolist())
    message.entry_counts.extend(logprobs.entry_counts.tolist())
    message.token_logprobs.extend(entries.values.tolist())
    message.ranks.extend(entries.ranks.tolist())
    message.top_counts.extend(entries.top_counts.tolist())
    message.top_token_ids.extend(entries.top_ids.tolist())
    message.top_logprobs.extend(entries.top_values.tolist())


def _add_row_errors(completion: worker_pb2.StepCompletion, step: Step) -> None:
    if step.samples is None or step.rows is None:
        return
    for sample in np.flatnonzero(step.samples.status).tolist():
        status = SampleStatus(int(step.samples.status[sample]))
        if status is SampleStatus.SKIPPED:
            continue
        row = int(step.rows.sample_rows[sample])
        completion.row_errors.add(
            slot=step.rows.slots[row],
            incarnation=step.rows.incarnations[row],
            code=worker_pb2.RowError.Code.ValueType(status.value),
        )


def rejected_message(
    step_id: int, reason: worker_pb2.StepRejected.Reason.ValueType, violations: Sequence[str]
) -> worker_pb2.RunStepsResponse:
    """A plan or gate that changed nothing."""
    return worker_pb2.RunStepsResponse(
        rejected=worker_pb2.StepRejected(step_id=step_id, reason=reason, violations=violations)
    )


def failed_message(step_id: int, text: str) -> worker_pb2.RunStepsResponse:
    """The epoch is lost."""
    return worker_pb2.RunStepsResponse(
        failed=worker_pb2.StepFailed(step_id=step_id, scope=worker_pb2.StepFailed.SCOPE_EPOCH, message=text)
    )


def worker_info_message(
    facts: ModelFacts, shape: CacheShape, *, worker_instance_id: str, max_overlap_depth: int, version: str
) -> worker_pb2.GetWorkerInfoResponse:
    """What the worker is."""
    return worker_pb2.GetWorkerInfoResponse(
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        worker_instance_id=worker_instance_id,
        model=worker_pb2.WorkerModel(
            name=facts.name,
            fingerprint=facts.fingerprint,
            vocab_size=facts.vocab_size,
            max_context_tokens=facts.max_context_tokens,
            eos_token_ids=facts.eos_token_ids,
            bos_token_id=facts.bos_token_id,
            dtype=facts.dtype,
            has_tokenizer=bool(facts.tokenizer_bundle),
            weight_bytes=facts.weight_bytes,
        ),
        limits=worker_pb2.WorkerLimits(
            max_num_seqs=shape.max_num_seqs,
            num_slots=shape.num_slots,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_model_len,
            num_blocks=sum(group.num_blocks for group in shape.groups),
            block_size=shape.block_size,
            max_overlap_depth=max_overlap_depth,
            kv_cache_bytes=sum(cache_bytes(shape, facts)),
            kv_groups=_kv_groups(facts, shape),
            replays_windows=shape.replays_windows,
        ),
        device=facts.device,
        version=version,
    )


def _kv_groups(facts: ModelFacts, shape: CacheShape) -> list[worker_pb2.KvGroup]:
    layers = shape.group_of_layer or (0,)
    return [
        worker_pb2.KvGroup(
            window_tokens=group.window,
            num_layers=layers.count(index),
            num_blocks=group.num_blocks,
            kv_bytes_per_token=facts.kv_bytes_per_token // len(layers) * layers.count(index),
        )
        for index, group in enumerate(shape.groups)
    ]
