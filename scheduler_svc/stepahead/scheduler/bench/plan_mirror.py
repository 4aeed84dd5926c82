"""The rows of a step, read from its plan alone, as a worker reads them."""

from __future__ import annotations

from dataclasses import dataclass

from stepahead.scheduler.core import Incarnation, SlotId, StepId, StepPlan, StepResult
from stepahead.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one step, explicit ones first, then decode members by joining order."""

    step_id: StepId
    num_tokens: int
    slots: list[SlotId]
    incarnations: list[Incarnation]
    token_counts: list[int] | None
    """Tokens that each row samples, 0 or 1; None: one each."""

    @property
    def num_sampled(self) -> int:
        """Tokens the step samples."""
        return len(self.slots) if self.token_counts is None else sum(self.token_counts)


class PlanMirror:
    """The worker's half of a lane without the model: slots and the decode set."""

    def __init__(self) -> None:
        self._incarnations: dict[SlotId, Incarnation] = {}
        self._decode_set: dict[SlotId, None] = {}
        self._members: tuple[list[SlotId], list[Incarnation]] | None = None
        """Columns of the decode set; None when it has changed since."""

    def rows_of(self, plan: StepPlan) -> StepRows:
        """Applies the plan's deltas and returns its rows."""
        self._apply_deltas(plan)
        slots, incarnations = self._columns(plan)
        token_counts = None
        if plan.row_slots:
            token_counts = [int(samples) for samples in plan.row_samples] + [1] * len(slots)
            if all(plan.row_samples):
                token_counts = None
            slots = [*plan.row_slots, *slots]
            incarnations = [*(self._incarnations[slot] for slot in plan.row_slots), *incarnations]
        if len(slots) != plan.total_rows:
            raise AssertionError(f"step {plan.step_id} has {len(slots)} rows, its plan says {plan.total_rows}")
        return StepRows(plan.step_id, plan.total_tokens, slots, incarnations, token_counts)

    def _apply_deltas(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            del self._incarnations[slot]
            self._decode_set.pop(slot, None)
        for admission in plan.admissions:
            self._incarnations[admission.slot] = admission.incarnation
        for slot in plan.left_slots:
            del self._decode_set[slot]
        for slot in plan.joined_slots:
            self._decode_set[slot] = None
        if plan.released_slots or plan.left_slots or plan.joined_slots:
            self._members = None

    def _columns(self, plan: StepPlan) -> tuple[list[SlotId], list[Incarnation]]:
        if plan.sit_out_slots:
            sitting_out = {*plan.sit_out_slots}
            slots = [slot for slot in self._decode_set if slot not in sitting_out]
            return slots, [self._incarnations[slot] for slot in slots]
        if self._members is None:
            slots = list(self._decode_set)
            self._members = slots, [self._incarnations[slot] for slot in slots]
        return self._members


def result_of(rows: StepRows, *, epoch: int, token_id: int) -> StepResult:
    """The completion of a step whose every sampling row sampled `token_id`."""
    return StepResult(
        epoch=epoch,
        step_id=rows.step_id,
        incarnations=list(rows.incarnations),
        token_counts=rows.token_counts,
        token_ids=[token_id] * rows.num_sampled,
        faults={},
    )


def boundary_of(rows: StepRows, *, epoch: int, token_id: int) -> bytes:
    """The same completion as the message a worker sends, with its timings: an encoded RunStepsResponse."""
    completion = worker_pb2.StepCompletion(
        slots=rows.slots,
        incarnations=rows.incarnations,
        token_counts=rows.token_counts or (),
        token_ids=[token_id] * rows.num_sampled,
        timings=worker_pb2.StepTimings(launch_ns=60_000, forward_ns=9_000_000, sample_ns=250_000),
    )
    boundary = worker_pb2.StepBoundary(
        worker_epoch=epoch,
        completed_step_id=rows.step_id,
        running_step_id=rows.step_id + 1,
        queued_steps=1,
        gap_ns=2_000,
        completion=completion,
        send_delay_ns=40_000,
    )
    return worker_pb2.RunStepsResponse(boundary=boundary).SerializeToString()
