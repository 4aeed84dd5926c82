"""Gates: what they must name, and that rows fail closed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepahead.v1.worker_pb2 import SampleGate
from stepahead.worker.errors import PlanInvalid
from stepahead.worker.gate import GateState, check_ungated
from stepahead.worker.runner import SampleStatus, StepBatch, StepSamples
from tests.worker.fakes import VOCAB_SIZE
from tests.worker.plans import TableDriver, admission, plan

MASK, SKIP = SampleGate.VERDICT_MASK, SampleGate.VERDICT_SKIP


def gated_step() -> tuple[StepBatch, GateState]:
    """Slots 0 and 2 are constrained and sample, slot 1 is not constrained."""
    messages = [admission(slot, [1, 2], constrained=slot != 1) for slot in range(3)]
    batch, rows = TableDriver().run(plan(1, rows=[(slot, 0, 2, True) for slot in range(3)], admissions=messages))
    return batch, GateState(rows, VOCAB_SIZE)


def gate(**fields: Any) -> SampleGate:
    both = {
        "step_id": 1,
        "slots": [2, 0],
        "incarnations": [102, 100],
        "positions": [1, 1],
        "verdicts": [MASK, SKIP],
        "masks": [bytes([0, 0, 4, 0, 0])],
    }
    return SampleGate(**(both | fields))


def test_a_gate_masks_and_skips_its_rows_only() -> None:
    batch, state = gated_step()
    state.accept(gate())
    masks = state.masked(batch).sampling.masks
    assert [None if mask is None else mask.tolist() for mask in masks] == [[0] * 5, None, [0, 0, 4, 0, 0]]
    samples = StepSamples(np.array([0, 7, 18]), np.array([SampleStatus.NOTHING_ALLOWED, 0, 0], np.uint8))
    state.mark(samples)
    assert samples.status.tolist() == [SampleStatus.SKIPPED, 0, 0]


def test_without_a_gate_every_constrained_row_gets_the_empty_mask() -> None:
    """I2: a missing mask fails closed; "all tokens allowed" is never a default."""
    batch, state = gated_step()
    masks = state.masked(batch).sampling.masks
    assert [None if mask is None else mask.tolist() for mask in masks] == [[0] * 5, None, [0] * 5]
    status = np.array([SampleStatus.NOTHING_ALLOWED, 0, SampleStatus.POSITION_MISMATCH], np.uint8)
    state.mark(StepSamples(np.zeros(3, np.int64), status))
    assert status.tolist() == [SampleStatus.GATE_MISSING, 0, SampleStatus.POSITION_MISMATCH]


def test_a_second_gate_changes_nothing() -> None:
    """Gates are idempotent."""
    batch, state = gated_step()
    state.accept(gate())
    state.accept(gate(verdicts=[SKIP, SKIP], masks=[]))
    masks = state.masked(batch).sampling.masks
    assert masks[2] is not None
    assert masks[2].tolist() == [0, 0, 4, 0, 0]


BAD_GATES: list[tuple[str, dict[str, Any]]] = [
    ("slots, incarnations, positions and verdicts differ", {"positions": [1]}),
    ("masks: has 2 entries for 1 MASK rows", {"masks": [b"12345", b"12345"]}),
    ("slots[0]: slot 1 is not a constrained row", {"slots": [1, 0]}),
    ("slots[1]: slot 2 is not a constrained row", {"slots": [2, 2]}),
    (
        "constrained slots [0] of step 1 are not named",
        {"slots": [2], "incarnations": [102], "positions": [1], "verdicts": [MASK]},
    ),
    ("incarnations[0]: slot 2 holds 102", {"incarnations": [9, 100]}),
    ("positions[1]: slot 0 feeds 1 last", {"positions": [1, 2]}),
    ("verdicts[1]: unknown verdict 0", {"verdicts": [MASK, 0]}),
    ("masks (slots[0]): has 4 bytes, must be 5", {"masks": [b"1234"]}),
]


@pytest.mark.parametrize(("violation", "fields"), BAD_GATES, ids=[name for name, _ in BAD_GATES])
def test_a_gate_for_other_rows_is_refused(violation: str, fields: dict[str, Any]) -> None:
    """I3: a mask names step, slot, incarnation and position."""
    batch, state = gated_step()
    with pytest.raises(PlanInvalid) as caught:
        state.accept(gate(**fields))
    assert any(violation in line for line in caught.value.violations), caught.value.violations
    assert not state.arrived
    assert state.masked(batch).sampling.masks[2] is not None


def test_a_gate_for_a_step_without_constrained_rows_must_be_empty() -> None:
    check_ungated(SampleGate(step_id=1))
    with pytest.raises(PlanInvalid, match="no constrained row"):
        check_ungated(gate())
