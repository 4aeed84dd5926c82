"""Checks the admissions of a step plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepahead.worker.slot_table import Admission

if TYPE_CHECKING:
    from stepahead.v1.worker_pb2 import SlotAdmission, SlotSampling, StepPlan
    from stepahead.worker.runner import Int64Array
    from stepahead.worker.slot_overlay import SlotOverlay, Violations
    from stepahead.worker.slot_table import SlotTable


class AdmissionChecker:
    """Turns `SlotAdmission` messages into checked `Admission` values.

    Args:
        table: the state before the plan.
        overlay: the plan's deltas so far; admissions are added to it.
        faults: collects what is wrong.
        committed_through: newest step the scheduler has applied: later steps may still use a slot.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        table: SlotTable,
        overlay: SlotOverlay,
        faults: Violations,
        committed_through: int,
        vocab_size: int,
    ) -> None:
        self._table = table
        self._overlay = overlay
        self._faults = faults
        self._committed_through = committed_through
        self._vocab_size = vocab_size

    def check(self, plan: StepPlan) -> list[Admission]:
        """The plan's admissions; faults go to the collector."""
        admissions: list[Admission] = []
        incarnations: set[int] = set()
        for index, message in enumerate(plan.admissions):
            admission = self._check_one(f"admissions[{index}]", message)
            if admission is None:
                continue
            if message.incarnation in incarnations:
                self._faults.add(f"admissions[{index}].incarnation", f"{message.incarnation} is used twice")
            incarnations.add(message.incarnation)
            self._overlay.admit(admission)
            admissions.append(admission)
        return admissions

    def _check_one(self, field: str, message: SlotAdmission) -> Admission | None:
        if not self._slot_is_free(field, message.slot):
            return None
        if message.incarnation == 0:
            self._faults.add(f"{field}.incarnation", "must be at least 1")
        elif bool((self._table.incarnation == message.incarnation).any()):
            self._faults.add(f"{field}.incarnation", f"{message.incarnation} is in use")
        token_ids = self._check_history(field, message)
        block_ids = self._check_blocks(field, message)
        suppressed = self._check_sampling(f"{field}.sampling", message.sampling)
        sampling = message.sampling
        return Admission(
            slot=message.slot,
            incarnation=message.incarnation,
            token_ids=token_ids,
            num_prompt_tokens=message.num_prompt_tokens,
            num_settled_tokens=message.num_settled_tokens,
            block_ids=block_ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0 if sampling.top_k >= self._vocab_size else sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            choice_index=sampling.choice_index,
            suppressed=suppressed,
            min_tokens=sampling.min_tokens,
            constrained=message.constrained,
        )

    def _slot_is_free(self, field: str, slot: int) -> bool:
        if not self._overlay.exists(slot, f"{field}.slot", self._faults):
            return False
        held = self._overlay.incarnation(slot)
        if held:
            self._faults.add(f"{field}.slot", f"slot {slot} is occupied by incarnation {held}")
            return False
        last_row_step = int(self._table.last_row_step[slot])
        if last_row_step > self._committed_through:
            self._faults.add(
                f"{field}.slot", f"slot {slot} is still named by step {last_row_step}, which is not committed"
            )
            return False
        return True

    def _check_history(self, field: str, message: SlotAdmission) -> Int64Array:
        token_ids = np.array(list(message.token_ids), np.int64)
        length, max_model_len = len(token_ids), self._table.shape.max_model_len
        if not 1 <= length <= max_model_len:
            self._faults.add(f"{field}.token_ids", f"has {length} tokens, must be 1 .. {max_model_len}")
        elif int(token_ids.max()) >= self._vocab_size:
            index = int(token_ids.argmax())
            self._faults.add(
                f"{field}.token_ids[{index}]", f"{token_ids[index]} is not in 0 .. {self._vocab_size - 1}"
            )
        if not 1 <= message.num_prompt_tokens <= max(length, 1):
            self._faults.add(f"{field}.num_prompt_tokens", f"{message.num_prompt_tokens} is not in 1 .. {length}")
        if message.num_settled_tokens >= max(length, 1):
            self._faults.add(
                f"{field}.num_settled_tokens",
                f"{message.num_settled_tokens} leaves nothing to feed of {length} tokens",
            )
        return token_ids

    def _check_blocks(self, field: str, message: SlotAdmission) -> list[int]:
        block_ids = list(message.block_ids)
        shape = self._table.shape
        if len(block_ids) > self._table.max_blocks:
            self._faults.add(
                f"{field}.block_ids", f"{len(block_ids)} blocks, max_model_len allows {self._table.max_blocks}"
            )
        for index, block_id in enumerate(block_ids):
            if block_id >= shape.num_blocks:
                self._faults.add(
                    f"{field}.block_ids[{index}]", f"block {block_id} is not in 0 .. {shape.num_blocks - 1}"
                )
        if message.num_settled_tokens > len(block_ids) * shape.block_size:
            self._faults.add(
                f"{field}.num_settled_tokens",
                f"{message.num_settled_tokens} do not fit {len(block_ids)} blocks of {shape.block_size}",
            )
        return block_ids

    def _check_sampling(self, field: str, sampling: SlotSampling) -> Int64Array | None:
        temperature = sampling.temperature
        if not (math.isfinite(temperature) and temperature >= 0):
            self._faults.add(f"{field}.temperature", f"{temperature} is not a finite number of at least 0")
        if not 0 < sampling.top_p <= 1:
            self._faults.add(f"{field}.top_p", f"{sampling.top_p} is not in (0, 1]")
        if not 0 <= sampling.min_p <= 1:
            self._faults.add(f"{field}.min_p", f"{sampling.min_p} is not in [0, 1]")
        if not sampling.suppressed_token_ids:
            return None
        suppressed = np.array(list(sampling.suppressed_token_ids), np.int64)
        if int(suppressed.max()) >= self._vocab_size:
            index = int(suppressed.argmax())
            self._faults.add(
                f"{field}.suppressed_token_ids[{index}]",
                f"{suppressed[index]} is not in 0 .. {self._vocab_size - 1}",
            )
        return suppressed
