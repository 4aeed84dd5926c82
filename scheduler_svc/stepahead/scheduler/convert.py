"""Core values to wire messages and back, and nothing else.

Column order is the core's; protobuf copies Python sequences as they are (a NumPy array would be slower).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepahead.scheduler.core import (
    Admission,
    GateRow,
    Incarnation,
    LaneConfig,
    RequestKey,
    RowFault,
    SamplingSpec,
    SettleMode,
    StepId,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WindowPool,
)
from stepahead.v1 import worker_pb2

_SETTLE = {
    SettleMode.COMPLETE_IN_PLACE: worker_pb2.SETTLE_MODE_COMPLETE_IN_PLACE,
    SettleMode.RETAIN: worker_pb2.SETTLE_MODE_RETAIN,
}
_FAULTS = {
    worker_pb2.RowError.CODE_NON_FINITE: RowFault.NON_FINITE,
    worker_pb2.RowError.CODE_POSITION_MISMATCH: RowFault.POSITION_MISMATCH,
    worker_pb2.RowError.CODE_NOTHING_ALLOWED: RowFault.NOTHING_ALLOWED,
    worker_pb2.RowError.CODE_GATE_MISSING: RowFault.GATE_MISSING,
}


PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1
"""1: penalties, bans, log probabilities and KV groups. A worker of 0 would ignore these fields without a word."""

GATE_WAIT_NS = 2_000_000_000
"""How long a step waits for its masks; a row without one then skips, and is fed again."""


class WireError(Exception):
    """A peer sent what cannot be: an enum value this version does not know, columns of different lengths."""


def plan_to_proto(plan: StepPlan) -> worker_pb2.StepPlan:
    """A step plan for the wire. Appends of one block each become runs per slot."""
    message = worker_pb2.StepPlan(
        step_id=plan.step_id,
        gate_wait_ns=GATE_WAIT_NS,
        committed_through=plan.committed_through,
        previous_step_id=plan.step_id - 1,
        settle=_SETTLE[plan.settle],
        total_tokens=plan.total_tokens,
        total_rows=plan.total_rows,
    )
    # Steady decode sets nothing below: its plan is the numbers above, whatever the width of the batch.
    if plan.released_slots:
        message.released_slots.extend(plan.released_slots)
        message.released_incarnations.extend(plan.released_incarnations)
    if plan.append_slots:
        message.append_slots.extend(plan.append_slots)
        message.append_counts.extend([1] * len(plan.append_slots))
        message.append_block_ids.extend(plan.append_block_ids)
        message.append_groups.extend(plan.append_groups)
    message.copy_src_block_ids.extend(plan.copy_src_block_ids)
    message.copy_dst_block_ids.extend(plan.copy_dst_block_ids)
    for admission in plan.admissions:
        message.admissions.append(_admission_to_proto(admission))
    message.joined_slots.extend(plan.joined_slots)
    message.sit_out_slots.extend(plan.sit_out_slots)
    message.left_slots.extend(plan.left_slots)
    if plan.row_slots:
        message.row_slots.extend(plan.row_slots)
        message.row_starts.extend(plan.row_starts)
        message.row_counts.extend(plan.row_counts)
        message.row_samples.extend(plan.row_samples)
    return message


def _admission_to_proto(admission: Admission) -> worker_pb2.SlotAdmission:
    return worker_pb2.SlotAdmission(
        slot=admission.slot,
        incarnation=admission.incarnation,
        token_ids=admission.token_ids,
        num_prompt_tokens=admission.num_prompt_tokens,
        num_settled_tokens=admission.num_settled_tokens,
        replay_start=admission.replay_start,
        block_ids=admission.block_ids,
        block_counts=admission.block_counts,
        null_counts=admission.null_counts,
        sampling=_sampling_to_proto(admission.sampling, admission.min_tokens),
        constrained=admission.constrained,
    )


def _sampling_to_proto(sampling: SamplingSpec, min_tokens: int) -> worker_pb2.SlotSampling:
    return worker_pb2.SlotSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice_index=sampling.choice_index,
        suppressed_token_ids=sampling.suppressed_token_ids,
        min_tokens=min_tokens,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        bias_token_ids=[token_id for token_id, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        bad_word_lengths=[len(word) for word in sampling.bad_words],
        bad_word_token_ids=[token_id for word in sampling.bad_words for token_id in word],
        allowed_token_ids=sampling.allowed_token_ids,
        logprobs_top_k=sampling.logprobs_top_k,
        prompt_logprobs_top_k=sampling.prompt_logprobs_top_k,
        processed_logprobs=sampling.processed_logprobs,
    )


def gate_to_proto(
    step_id: StepId, rows: Sequence[GateRow], masks: Mapping[RequestKey, bytes]
) -> worker_pb2.SampleGate:
    """The gate of a step: a row whose sample does not count, or that has no mask, is told to skip (rule I2)."""
    masked = [row.wanted and row.key in masks for row in rows]
    verdicts = worker_pb2.SampleGate.Verdict
    return worker_pb2.SampleGate(
        step_id=step_id,
        slots=[row.slot for row in rows],
        incarnations=[row.incarnation for row in rows],
        positions=[row.position for row in rows],
        verdicts=[verdicts.VERDICT_MASK if has_mask else verdicts.VERDICT_SKIP for has_mask in masked],
        masks=[masks[row.key] for row, has_mask in zip(rows, masked, strict=True) if has_mask],
    )


def result_from_proto(boundary: worker_pb2.StepBoundary) -> StepResult:
    """The completion inside a boundary.

    Raises:
        WireError: a row error code of a newer peer, or token counts that fit no rows.
    """
    completion = boundary.completion
    counts = completion.token_counts
    if counts and (len(counts) != len(completion.incarnations) or max(counts) > 1):
        raise WireError(f"token_counts {list(counts)[:8]} for {len(completion.incarnations)} rows")
    faults: dict[Incarnation, RowFault] = {}
    for error in completion.row_errors:
        fault = _FAULTS.get(error.code)
        if fault is None:
            raise WireError(f"row error code {error.code}")
        faults[Incarnation(error.incarnation)] = fault
    return StepResult(
        epoch=boundary.worker_epoch,
        step_id=StepId(boundary.completed_step_id),
        # A slice is a list, and made faster than list() makes one.
        incarnations=completion.incarnations[:],  # type: ignore[arg-type]  # ints are Incarnations here
        token_counts=counts[:] or None,
        token_ids=completion.token_ids[:],
        faults=faults,
        logprobs=_logprobs_from_proto(completion.output_logprobs),
        prompt_logprobs=_logprobs_from_proto(completion.prompt_logprobs),
    )


def _logprobs_from_proto(message: worker_pb2.TokenLogprobs) -> dict[Incarnation, TokenLogprobs]:
    """Columns of all rows to columns per row.

    Raises:
        WireError: the columns do not fit each other.
    """
    num_rows = len(message.incarnations)
    if not num_rows:
        return {}
    num_entries, num_best = len(message.token_logprobs), sum(message.top_counts)
    if not (
        len(message.entry_counts) == len(message.first_positions) == num_rows
        and sum(message.entry_counts) == len(message.ranks) == len(message.top_counts) == num_entries
        and len(message.top_token_ids) == len(message.top_logprobs) == num_best
    ):
        raise WireError("the columns of log probabilities differ in length")
    rows: dict[Incarnation, TokenLogprobs] = {}
    entry = best = 0
    for incarnation, first, count in zip(
        message.incarnations, message.first_positions, message.entry_counts, strict=True
    ):
        top_counts = tuple(message.top_counts[entry : entry + count])
        best_end = best + sum(top_counts)
        rows[Incarnation(incarnation)] = TokenLogprobs(
            first_position=first,
            token_logprobs=tuple(message.token_logprobs[entry : entry + count]),
            ranks=tuple(message.ranks[entry : entry + count]),
            top_counts=top_counts,
            top_token_ids=tuple(message.top_token_ids[best:best_end]),
            top_logprobs=tuple(message.top_logprobs[best:best_end]),
        )
        entry, best = entry + count, best_end
    return rows


def lane_config_of(info: worker_pb2.GetWorkerInfoResponse) -> LaneConfig:
    """The limits of a worker that knows every field this scheduler may send.

    Raises:
        ValueError: it does not, or a limit makes no sense; the message says which.
    """
    if info.protocol_major != PROTOCOL_MAJOR or info.protocol_minor < PROTOCOL_MINOR:
        raise ValueError(
            f"it speaks protocol {info.protocol_major}.{info.protocol_minor}, this scheduler needs "
            f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR} or a newer {PROTOCOL_MAJOR}: run both at the same version"
        )
    return lane_config_from_proto(info.limits)


def lane_config_from_proto(limits: worker_pb2.WorkerLimits) -> LaneConfig:
    """The worker's limits as the core wants them.

    Raises:
        ValueError: a limit makes no sense; the message names it.
    """
    groups = limits.kv_groups
    if any(group.window_tokens == 0 for group in groups[1:]):
        raise ValueError("kv_groups: only the first may be without a window")
    full = [group.num_blocks for group in groups if not group.window_tokens] if groups else [limits.num_blocks]
    if groups and full == [0]:
        raise ValueError("num_blocks of kv_groups[0] must be at least 1, not 0")
    return LaneConfig(
        num_slots=limits.num_slots,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_blocks=sum(full),
        block_size=limits.block_size,
        windows=tuple(
            WindowPool(window=group.window_tokens, num_blocks=group.num_blocks, num_layers=group.num_layers)
            for group in groups
            if group.window_tokens
        ),
        replays_windows=limits.replays_windows,
    )
