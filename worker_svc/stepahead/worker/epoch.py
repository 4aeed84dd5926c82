"""One session's state on the host thread: its slots, its steps, the boundaries not yet committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import structlog

from stepahead.v1 import worker_pb2
from stepahead.worker import convert
from stepahead.worker.errors import PlanInvalid
from stepahead.worker.gate import GateState, check_ungated
from stepahead.worker.plan_check import check_plan
from stepahead.worker.runner import SampleStatus
from stepahead.worker.slot_table import SlotTable
from stepahead.worker.status import StreamStatus
from stepahead.worker.step import Step
from stepahead.worker.step_batch import BatchBuilder
from stepahead.worker.step_round import StepRound

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepahead.worker.commands import Command, OpenEpoch, Outlet
    from stepahead.worker.plan_check import PlanEdits
    from stepahead.worker.runner import CacheShape
    from stepahead.worker.step_device import StepDevice

log = structlog.stdlib.get_logger()

StepRejected = worker_pb2.StepRejected


class Epoch:
    """From SessionOpened until the session is closed or replaced; host thread only.

    Args:
        opening: names the session and its stream.
        device: runs the steps.
        shape: of the batch and the cache.
        vocab_size: width of the logits.
        max_step_ns: bound of a step that states none.
        post: puts device events into the executor's inbox.
        identity: SessionOpened without step ids.
    """

    def __init__(
        self,
        opening: OpenEpoch,
        device: StepDevice,
        shape: CacheShape,
        *,
        vocab_size: int,
        max_step_ns: int,
        post: Callable[[Command], None],
        identity: worker_pb2.SessionOpened,
    ) -> None:
        self.outlet: Outlet = opening.outlet
        self.worker_epoch = opening.worker_epoch
        self.last_accepted_step_id = 0
        self.last_completed_step_id = 0
        self.round = StepRound(device, post=post, settle=self._settle)
        self._overlap_depth = opening.overlap_depth
        self._vocab_size = vocab_size
        self._max_step_ns = max_step_ns
        self._identity = identity
        self._table = SlotTable(shape)
        self._builder = BatchBuilder(self._table)
        self._kept: dict[int, tuple[worker_pb2.RunStepsResponse, int]] = {}  # boundaries above committed_through
        self._committed_through = 0
        self._drains: list[tuple[int, int]] = []  # (nonce, step that must be settled first)

    def announce(self) -> None:
        """Sends SessionOpened."""
        opened = worker_pb2.SessionOpened()
        opened.CopyFrom(self._identity)
        opened.last_completed_step_id = self.last_completed_step_id
        opened.last_accepted_step_id = self.last_accepted_step_id
        self.outlet.send(worker_pb2.RunStepsResponse(opened=opened))

    def resume(self, outlet: Outlet, last_completed_step_id: int) -> None:
        """Continues on another stream: SessionOpened, then every boundary the scheduler has not read."""
        if not self._committed_through <= last_completed_step_id <= self.last_completed_step_id:
            outlet.end(
                StreamStatus(
                    code=grpc.StatusCode.FAILED_PRECONDITION,
                    reason="BOUNDARY_UNAVAILABLE",
                    message=(
                        f"resume.last_completed_step_id is {last_completed_step_id}; boundaries above it can be "
                        f"sent again from {self._committed_through} to {self.last_completed_step_id}"
                    ),
                )
            )
            return
        self.outlet = outlet
        self.announce()
        for step_id, (message, ended_ns) in self._kept.items():
            if step_id > last_completed_step_id:
                outlet.send(message, ended_ns)

    def drain(self, nonce: int) -> None:
        """Answers Drained behind the boundary of everything accepted so far."""
        self.round.release_held()
        self._drains.append((nonce, self.last_accepted_step_id))
        self._answer_drains()

    def take_plan(self, plan: worker_pb2.StepPlan, read_ns: int) -> None:
        """Checks a plan and either applies and queues it, or rejects it and changes nothing."""
        refusal = self._check_order(plan)
        if refusal is not None:
            reason, text = refusal
            self._reject(plan.step_id, reason, [text])
            return
        try:
            edits = check_plan(plan, self._table, vocab_size=self._vocab_size)
        except PlanInvalid as error:
            self._reject(plan.step_id, StepRejected.REASON_INVALID, error.violations)
            return
        edits.apply(self._table, plan.step_id)
        self.last_accepted_step_id = plan.step_id
        self._forget_boundaries(plan.committed_through)
        self.round.accept(self._make_step(plan, edits, read_ns))

    def take_gate(self, gate: worker_pb2.SampleGate) -> None:
        """Hands a gate to its step; one for a step that was sampled already is dropped."""
        step = self.round.find_unsampled(gate.step_id)
        try:
            if step is None:
                if gate.step_id > self.last_accepted_step_id:
                    raise PlanInvalid([f"step_id: step {gate.step_id} was not accepted"])
            elif step.gate is None:
                check_ungated(gate)
            else:
                step.gate.accept(gate)
        except PlanInvalid as error:
            lines = [f"gate.{line}" for line in error.violations]
            self._reject(gate.step_id, StepRejected.REASON_INVALID, lines)

    def _check_order(
        self, plan: worker_pb2.StepPlan
    ) -> tuple[worker_pb2.StepRejected.Reason.ValueType, str] | None:
        """Whether the plan continues what was accepted; else why not."""
        step_id, newest = plan.step_id, self.last_accepted_step_id
        if 1 <= step_id <= newest:
            return StepRejected.REASON_ALREADY_EXECUTED, f"step_id: step {step_id} was accepted before"
        if step_id != newest + 1:
            return StepRejected.REASON_NOT_NEXT, f"step_id: is {step_id}, the next one is {newest + 1}"
        if plan.previous_step_id != newest:
            text = f"previous_step_id: is {plan.previous_step_id}, the newest accepted step is {newest}"
            return StepRejected.REASON_NOT_NEXT, text
        window = self._overlap_depth + 1
        if not 1 <= step_id - plan.committed_through <= window:
            text = (
                f"committed_through: is {plan.committed_through}; step {step_id} must be 1 .. {window} ahead "
                f"at overlap depth {self._overlap_depth}"
            )
            return StepRejected.REASON_OUT_OF_WINDOW, text
        if plan.committed_through > self.last_completed_step_id:
            text = (
                f"committed_through: step {plan.committed_through} has not completed, "
                f"the newest completed step is {self.last_completed_step_id}"
            )
            return StepRejected.REASON_INVALID, text
        return None

    def _make_step(self, plan: worker_pb2.StepPlan, edits: PlanEdits, read_ns: int) -> Step:
        batch = rows = gate = None
        if edits.num_rows:
            batch, rows = self._builder.build(plan.step_id, edits)
            if rows.constrained:
                gate = GateState(rows, self._vocab_size)
        return Step(
            step_id=plan.step_id,
            worker_epoch=self.worker_epoch,
            in_place=plan.settle == worker_pb2.SETTLE_MODE_COMPLETE_IN_PLACE,
            batch=batch,
            rows=rows,
            gate=gate,
            gate_wait_ns=plan.gate_wait_ns,
            max_step_ns=plan.max_step_ns or self._max_step_ns,
            read_ns=read_ns,
        )

    def _settle(self, step: Step) -> None:
        """The step's results are on the host: its boundary leaves, and is kept until it is committed."""
        samples = step.samples
        if step.gate is not None and samples is not None:
            step.gate.mark(samples)
        message = convert.boundary_message(step)
        self.last_completed_step_id = step.step_id
        self._kept[step.step_id] = (message, step.ended_ns)
        self.outlet.send(message, step.ended_ns)
        if samples is not None and samples.status.any():
            self._note_holes(step)
        self._answer_drains()

    def _note_holes(self, step: Step) -> None:
        if step.rows is None or step.samples is None:
            return
        for sample in step.samples.status.nonzero()[0].tolist():
            row = int(step.rows.sample_rows[sample])
            position = int(step.rows.last_positions[sample])
            # A mismatch fed nothing, and what its cell lacks is the sample of the position before.
            missed = step.samples.status[sample] == SampleStatus.POSITION_MISMATCH
            self._table.note_unsampled(
                slot=step.rows.slots[row],
                incarnation=step.rows.incarnations[row],
                step_id=step.step_id,
                position=position - 1 if missed else position,
            )

    def _answer_drains(self) -> None:
        while self._drains and self._drains[0][1] <= self.last_completed_step_id:
            nonce, _ = self._drains.pop(0)
            drained = worker_pb2.Drained(nonce=nonce, last_completed_step_id=self.last_completed_step_id)
            self.outlet.send(worker_pb2.RunStepsResponse(drained=drained))

    def _forget_boundaries(self, committed_through: int) -> None:
        while self._committed_through < committed_through:
            self._committed_through += 1
            del self._kept[self._committed_through]

    def _reject(
        self, step_id: int, reason: worker_pb2.StepRejected.Reason.ValueType, violations: list[str]
    ) -> None:
        if reason != StepRejected.REASON_ALREADY_EXECUTED:
            log.warning(
                "plan_rejected",
                step_id=step_id,
                worker_epoch=self.worker_epoch,
                reason=StepRejected.Reason.Name(reason),
                violations=violations,
            )
        self.outlet.send(convert.rejected_message(step_id, reason, violations))
