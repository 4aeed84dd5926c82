"""Checks the admissions of a step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepahead.worker.runner import NO_LOGPROBS
from stepahead.worker.sampling_check import SamplingChecker
from stepahead.worker.slot_table import Admission, BlockTable

if TYPE_CHECKING:
    from stepahead.v1.worker_pb2 import SlotAdmission, StepPlan
    from stepahead.worker.runner import CacheGroup, Int64Array
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
        self._sampling = SamplingChecker(faults, vocab_size)

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
        replay_start = self._check_replay(field, message)
        tables = self._check_tables(field, message)
        sampling = self._sampling.check(f"{field}.sampling", message.sampling)
        if sampling.prompt_logprobs_top_k != NO_LOGPROBS and message.num_settled_tokens:
            self._faults.add(
                f"{field}.num_settled_tokens",
                f"is {message.num_settled_tokens}, prompt_logprobs_top_k asks for every prompt position to be fed",
            )
        return Admission(
            slot=message.slot,
            incarnation=message.incarnation,
            token_ids=token_ids,
            num_prompt_tokens=message.num_prompt_tokens,
            num_settled_tokens=message.num_settled_tokens,
            replay_start=replay_start,
            tables=tables,
            sampling=sampling,
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

    def _check_replay(self, field: str, message: SlotAdmission) -> int:
        """The first position that is fed. Behind a replay every row's window lies in it (rule N7)."""
        shape, end = self._table.shape, message.num_settled_tokens
        if not message.HasField("replay_start"):
            return end
        start, name = message.replay_start, f"{field}.replay_start"
        if not shape.replays_windows:
            self._faults.add(name, "this worker has no windows that can be computed again alone")
            return end
        least = max(1, *(group.window - 1 for group in shape.groups))
        if end - start < least:
            self._faults.add(
                name, f"{start} is less than {least} positions, a whole window, before num_settled_tokens {end}"
            )
        if start % shape.block_size:
            self._faults.add(name, f"{start} is no multiple of block_size {shape.block_size}")
        return start

    def _check_tables(self, field: str, message: SlotAdmission) -> tuple[BlockTable, ...]:
        """The block tables by KV group, whatever is wrong with them."""
        groups = self._table.shape.groups
        counts = list(message.block_counts) or [len(message.block_ids)]
        nulls = list(message.null_counts) or [0] * len(groups)
        for name, column in (("block_counts", counts), ("null_counts", nulls)):
            if len(column) != len(groups):
                self._faults.add(f"{field}.{name}", f"has {len(column)} entries, there are {len(groups)} KV groups")
        if sum(counts) != len(message.block_ids):
            self._faults.add(f"{field}.block_counts", f"name {sum(counts)} blocks of {len(message.block_ids)}")
        tables: list[BlockTable] = []
        start = 0
        for group, (count, num_null) in enumerate(zip(counts, nulls, strict=False)):
            table = BlockTable(num_null, list(message.block_ids[start : start + count]))
            if group < len(groups):
                self._check_table(field, message, table, groups[group], start)
            start += count
            tables.append(table)
        return tuple(tables)

    def _check_table(
        self, field: str, message: SlotAdmission, table: BlockTable, group: CacheGroup, start: int
    ) -> None:
        size, num_settled = self._table.shape.block_size, message.num_settled_tokens
        if len(table) > self._table.max_blocks:
            self._faults.add(
                f"{field}.block_ids", f"{len(table)} blocks, max_model_len allows {self._table.max_blocks}"
            )
        for index, block_id in enumerate(table.block_ids, start):
            if block_id >= group.num_blocks:
                self._faults.add(
                    f"{field}.block_ids[{index}]", f"block {block_id} is not in 0 .. {group.num_blocks - 1}"
                )
        # A row sees what its window holds, in a replay no more than what has been fed before it.
        first = message.replay_start if message.HasField("replay_start") else num_settled - group.window + 1
        if table.num_null > (max(0, first) // size if group.window else 0):
            self._faults.add(
                f"{field}.null_counts",
                f"{table.num_null} null blocks of {size}, but position {max(0, first)} is seen in one of them",
            )
        held = first if group.window and message.HasField("replay_start") else num_settled
        if held > len(table) * size:
            self._faults.add(f"{field}.num_settled_tokens", f"{held} do not fit {len(table)} blocks of {size}")
