"""Gates of constrained rows: masks that arrive after the plan, past queued plans.

A gate names every constrained row of its step. Rows fail closed: a row without a mask samples under the empty
mask, which allows nothing, so its cell stays as it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stepahead.v1.worker_pb2 import SampleGate
from stepahead.worker.errors import PlanInvalid
from stepahead.worker.runner import SampleStatus
from stepahead.worker.slot_overlay import Violations

if TYPE_CHECKING:
    from stepahead.worker.runner import StepBatch, StepSamples, UInt8Array
    from stepahead.worker.step_batch import StepRows


class GateState:
    """The gate of one step.

    Args:
        rows: of the step; `rows.constrained` is not empty.
        vocab_size: width of the logits.
    """

    def __init__(self, rows: StepRows, vocab_size: int) -> None:
        self._rows = rows
        self._num_mask_bytes = -(-vocab_size // 8)
        self._masks: dict[int, UInt8Array] = {}
        self._skipped: list[int] = []
        self._missing: list[int] = list(rows.constrained)
        self.arrived = False

    def accept(self, gate: SampleGate) -> None:
        """Takes a gate; a second one for the same step changes nothing.

        Raises:
            PlanInvalid: it does not name exactly the constrained rows as they are; nothing changed.
        """
        if self.arrived:
            return
        faults = Violations()
        masks: dict[int, UInt8Array] = {}
        skipped: list[int] = []
        if not len(gate.slots) == len(gate.incarnations) == len(gate.positions) == len(gate.verdicts):
            faults.add("slots", "slots, incarnations, positions and verdicts differ in length")
        num_masks = sum(verdict == SampleGate.VERDICT_MASK for verdict in gate.verdicts)
        if num_masks != len(gate.masks):
            faults.add("masks", f"has {len(gate.masks)} entries for {num_masks} MASK rows")
        faults.raise_if_any()
        by_slot: dict[int, int] = {self._rows.slots[self._rows.sample_rows[i]]: i for i in self._rows.constrained}
        remaining_masks = iter(gate.masks)
        for index, (slot, verdict) in enumerate(zip(gate.slots, gate.verdicts, strict=True)):
            sample = by_slot.pop(slot, None)
            if sample is None:
                faults.add(f"slots[{index}]", f"slot {slot} is not a constrained row of step {gate.step_id}")
                continue
            self._check_identity(index, sample, gate, faults)
            if verdict == SampleGate.VERDICT_MASK:
                masks[sample] = self._check_mask(index, next(remaining_masks), faults)
            elif verdict == SampleGate.VERDICT_SKIP:
                skipped.append(sample)
            else:
                faults.add(f"verdicts[{index}]", f"unknown verdict {verdict}")
        if by_slot:
            faults.add("slots", f"constrained slots {sorted(by_slot)} of step {gate.step_id} are not named")
        faults.raise_if_any()
        self._masks, self._skipped, self._missing = masks, skipped, []
        self.arrived = True

    def masked(self, batch: StepBatch) -> StepBatch:
        """The batch with a mask for every constrained row; rows without one get the empty mask."""
        nothing_allowed = np.zeros(self._num_mask_bytes, np.uint8)
        masks: list[UInt8Array | None] = [None] * len(batch.sample_rows)
        for sample in self._rows.constrained:
            masks[sample] = self._masks.get(sample, nothing_allowed)
        return replace(batch, sampling=replace(batch.sampling, masks=tuple(masks)))

    def mark(self, samples: StepSamples) -> None:
        """Says why rows without a mask sampled nothing; writes `samples.status`."""
        for sample in self._skipped:
            samples.status[sample] = SampleStatus.SKIPPED
        for sample in self._missing:
            if samples.status[sample] != SampleStatus.POSITION_MISMATCH:
                samples.status[sample] = SampleStatus.GATE_MISSING

    def _check_identity(self, index: int, sample: int, gate: SampleGate, faults: Violations) -> None:
        row = int(self._rows.sample_rows[sample])
        incarnation, position = self._rows.incarnations[row], int(self._rows.last_positions[sample])
        if gate.incarnations[index] != incarnation:
            faults.add(f"incarnations[{index}]", f"slot {gate.slots[index]} holds {incarnation}")
        if gate.positions[index] != position:
            faults.add(f"positions[{index}]", f"slot {gate.slots[index]} feeds {position} last")

    def _check_mask(self, index: int, mask: bytes, faults: Violations) -> UInt8Array:
        if len(mask) != self._num_mask_bytes:
            faults.add(f"masks (slots[{index}])", f"has {len(mask)} bytes, must be {self._num_mask_bytes}")
        return np.frombuffer(mask, np.uint8)


def check_ungated(gate: SampleGate) -> None:
    """A gate of a step without constrained rows names nothing.

    Raises:
        PlanInvalid: it does.
    """
    if gate.slots:
        raise PlanInvalid([f"slots: step {gate.step_id} has no constrained row that samples"])
