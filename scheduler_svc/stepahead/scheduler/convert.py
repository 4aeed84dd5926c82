"""Core values to wire messages and back, and nothing else.

Column order is the core's; protobuf copies Python sequences as they are (a NumPy array would be slower).
"""

from __future__ import annotations

from stepahead.scheduler.core import (
    Admission,
    Incarnation,
    LaneConfig,
    RowFault,
    SettleMode,
    StepId,
    StepPlan,
    StepResult,
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


class WireError(Exception):
    """A peer sent what cannot be: an enum value this version does not know, columns of different lengths."""


def plan_to_proto(plan: StepPlan) -> worker_pb2.StepPlan:
    """A step plan for the wire. Appends of one block each become runs per slot."""
    message = worker_pb2.StepPlan(
        step_id=plan.step_id,
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
    sampling = admission.sampling
    return worker_pb2.SlotAdmission(
        slot=admission.slot,
        incarnation=admission.incarnation,
        token_ids=admission.token_ids,
        num_prompt_tokens=admission.num_prompt_tokens,
        num_settled_tokens=admission.num_settled_tokens,
        block_ids=admission.block_ids,
        sampling=worker_pb2.SlotSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            choice_index=sampling.choice_index,
            suppressed_token_ids=sampling.suppressed_token_ids,
            min_tokens=admission.min_tokens,
        ),
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
        incarnations=list(completion.incarnations),  # type: ignore[arg-type]  # ints are Incarnations here
        token_counts=list(counts) or None,
        token_ids=list(completion.token_ids),
        faults=faults,
    )


def lane_config_from_proto(limits: worker_pb2.WorkerLimits) -> LaneConfig:
    """The worker's limits as the core wants them.

    Raises:
        ValueError: a limit makes no sense; the message names it.
    """
    return LaneConfig(
        num_slots=limits.num_slots,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
    )
