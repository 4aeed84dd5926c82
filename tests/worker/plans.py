"""Step plans for tests, written with small explicit numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepahead.v1 import worker_pb2
from stepahead.worker.plan_check import check_plan
from stepahead.worker.runner import CacheShape, StepBatch
from stepahead.worker.slot_table import SlotTable
from stepahead.worker.step_batch import BatchBuilder, StepRows
from tests.worker.fakes import VOCAB_SIZE

RETAIN = worker_pb2.SETTLE_MODE_RETAIN
IN_PLACE = worker_pb2.SETTLE_MODE_COMPLETE_IN_PLACE

SHAPE = CacheShape(
    num_slots=6, num_blocks=16, block_size=4, max_model_len=16, max_num_batched_tokens=8, max_num_seqs=3
)


def sampling(**fields: Any) -> worker_pb2.SlotSampling:
    """Greedy, unless told otherwise."""
    return worker_pb2.SlotSampling(**({"top_p": 1.0} | fields))


def admission(
    slot: int,
    token_ids: list[int],
    *,
    incarnation: int | None = None,
    block_ids: list[int] | None = None,
    **fields: Any,
) -> worker_pb2.SlotAdmission:
    """A sequence whose prompt is its whole history; incarnation 100 + slot, blocks 2 * slot and 2 * slot + 1."""
    return worker_pb2.SlotAdmission(
        **(
            {
                "slot": slot,
                "incarnation": 100 + slot if incarnation is None else incarnation,
                "token_ids": token_ids,
                "num_prompt_tokens": len(token_ids),
                "block_ids": [2 * slot, 2 * slot + 1] if block_ids is None else block_ids,
                "sampling": sampling(),
            }
            | fields
        )
    )


def plan(
    step_id: int,
    *,
    rows: list[tuple[int, int, int, bool]] | None = None,
    decode: int = 0,
    committed: int | None = None,
    **fields: Any,
) -> worker_pb2.StepPlan:
    """A plan.

    Args:
        step_id: previous_step_id is one less.
        rows: explicit rows: slot, start, count, samples.
        decode: members of the decode set that run.
        committed: committed_through; the step before unless given.
        fields: anything else of StepPlan, totals included.
    """
    rows = rows or []
    return worker_pb2.StepPlan(
        **(
            {
                "step_id": step_id,
                "previous_step_id": step_id - 1,
                "committed_through": step_id - 1 if committed is None else committed,
                "settle": RETAIN,
                "row_slots": [row[0] for row in rows],
                "row_starts": [row[1] for row in rows],
                "row_counts": [row[2] for row in rows],
                "row_samples": [row[3] for row in rows],
                "total_tokens": sum(row[2] for row in rows) + decode,
                "total_rows": len(rows) + decode,
            }
            | fields
        )
    )


def start(step_id: int, slot: int, token_ids: list[int], **fields: Any) -> worker_pb2.StepPlan:
    """Admits a sequence, feeds its whole prompt, samples, and lets it join the decode set."""
    return plan(
        step_id,
        rows=[(slot, 0, len(token_ids), True)],
        admissions=[admission(slot, token_ids)],
        joined_slots=[slot],
        **fields,
    )


class TableDriver:
    """Checks and applies plans to a slot table, as the host thread does."""

    def __init__(self, shape: CacheShape = SHAPE) -> None:
        self.table = SlotTable(shape)
        self.builder = BatchBuilder(self.table)

    def run(self, message: worker_pb2.StepPlan) -> tuple[StepBatch, StepRows]:
        """Applies a plan that has rows; its arrays."""
        edits = check_plan(message, self.table, vocab_size=VOCAB_SIZE)
        edits.apply(self.table, message.step_id)
        return self.builder.build(message.step_id, edits)

    def apply(self, message: worker_pb2.StepPlan) -> None:
        """Applies a plan without rows."""
        check_plan(message, self.table, vocab_size=VOCAB_SIZE).apply(self.table, message.step_id)

    def snapshot(self) -> dict[str, str]:
        """Everything the table holds, for comparison."""
        columns = dict(vars(self.table))
        groups = columns.pop("groups")
        columns |= {
            f"{name} {index}": value for index, group in enumerate(groups) for name, value in vars(group).items()
        }
        return {
            name: repr(value.tolist() if isinstance(value, np.ndarray) else value)
            for name, value in columns.items()
        }
