"""A worker with tagged memory that speaks the wire messages and nothing else.

Reads and writes take place over an interval: the rows of a dispatched step run one by one at times the
simulation picks, anywhere between dispatch and completion, in order per slot but in any order across slots. Memory
that was given away too early therefore is read or overwritten by its old owner, and a token changes.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from stepahead.v1 import worker_pb2
from tests.simulation.tagged_model import POISON, fold, mix, next_token, tag_of


class ProtocolViolation(AssertionError):
    """The scheduler broke the worker protocol. The message starts with the rule's id."""


def require(condition: bool, rule: str, message: str) -> None:
    if not condition:
        raise ProtocolViolation(f"{rule}: {message}")


@dataclass
class Slot:
    """One row of the batch."""

    incarnation: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: worker_pb2.SlotSampling
    block_ids: list[int]
    next_position: int
    cell: tuple[int, int] | None = None
    copy: tuple[int, int] | None = None
    """(source, destination) of a block copy that is made just before the slot's first row runs."""
    refeed: bool = False
    """The last row came back empty: its position may be fed again."""


@dataclass
class Row:
    """One row of one step, with everything it needs frozen at dispatch."""

    slot: int
    state: Slot
    start: int
    count: int
    samples: bool
    block_ids: list[int]
    done: bool = False
    token: int | None = None
    fault: int = 0


@dataclass
class FakeStep:
    step_id: int
    rows: list[Row]
    failed: bool = False
    pending: list[Row] = field(default_factory=list)


class FakeWorker:
    """See the module docstring. Faults are drawn from `rng` with the given probabilities."""

    def __init__(
        self,
        limits: worker_pb2.WorkerLimits,
        *,
        overlap_depth: int,
        epoch: int,
        vocab: int,
        rng: random.Random,
        skip_rate: float = 0.0,
        nan_rate: float = 0.0,
        fail_rate: float = 0.0,
    ) -> None:
        self.limits = limits
        self.depth = overlap_depth
        self.epoch = epoch
        self.vocab = vocab
        self.rng = rng
        self.rates = (skip_rate, nan_rate, fail_rate)
        self.slots: dict[int, Slot] = {}
        self.decode_set: dict[int, None] = {}
        self.memory: dict[tuple[int, int], int] = {}
        self.steps: deque[FakeStep] = deque()
        self.last_accepted = 0
        self.last_failed = 0
        self.counters: Counter[str] = Counter()

    # ---------------------------------------------------------------------------------------- plans

    def accept(self, plan: worker_pb2.StepPlan) -> None:
        """Checks a plan and applies its deltas; its rows run later."""
        require(plan.step_id == self.last_accepted + 1, "B1", f"step {plan.step_id} after {self.last_accepted}")
        require(plan.previous_step_id == self.last_accepted, "B1", "previous_step_id")
        require(1 <= plan.step_id - plan.committed_through <= self.depth + 1, "B3", "window")
        self.last_accepted = plan.step_id
        self._apply_deltas(plan)
        rows = self._rows(plan)
        require(sum(r.count for r in rows) == plan.total_tokens, "M3", "total_tokens")
        require(len(rows) == plan.total_rows, "M3", "total_rows")
        require(plan.total_tokens <= self.limits.max_num_batched_tokens, "M3", "token budget")
        require(len(rows) <= self.limits.max_num_seqs, "M3", "row budget")
        require(bool(rows), "B9", "a plan without rows")
        step = FakeStep(plan.step_id, rows, pending=list(rows))
        # A plan made without knowing of a failed step builds on positions that were never written: it fails too.
        if plan.committed_through < self.last_failed or self.rng.random() < self.rates[2]:
            step.failed, step.pending = True, []
            self.last_failed = plan.step_id
            for row in rows:
                self._copy_tail(row.state)  # a failed step's deltas stand
            self.counters["failed_steps"] += 1
        self.steps.append(step)

    def _apply_deltas(self, plan: worker_pb2.StepPlan) -> None:
        for slot_id, incarnation in zip(plan.released_slots, plan.released_incarnations, strict=True):
            slot = self.slots.pop(slot_id, None)
            require(slot is not None and slot.incarnation == incarnation, "B6", f"release of slot {slot_id}")
            self.decode_set.pop(slot_id, None)
        cursor = 0
        for slot_id, count in zip(plan.append_slots, plan.append_counts, strict=True):
            blocks = list(plan.append_block_ids[cursor : cursor + count])
            cursor += count
            self._check_blocks(blocks, slot_id)
            require(slot_id in self.slots, "B7", f"append to empty slot {slot_id}")
            self.slots[slot_id].block_ids += blocks
        for admission in plan.admissions:
            require(admission.slot not in self.slots, "B6", f"slot {admission.slot} is occupied")
            require(admission.slot < self.limits.num_slots, "E9", "slot out of range")
            for step in self.steps:
                for row in step.rows:
                    require(
                        row.slot != admission.slot, "E3", f"slot {row.slot} is still named by step {step.step_id}"
                    )
            size = self.limits.block_size
            copied = dict(zip(plan.copy_dst_block_ids, plan.copy_src_block_ids, strict=True))
            require(admission.num_settled_tokens < len(admission.token_ids), "H5", "nothing is left to compute")
            num_cached = admission.num_settled_tokens // size
            self._check_shared(list(admission.block_ids[:num_cached]))
            self._check_blocks(list(admission.block_ids[num_cached:]), None)
            self.counters["cached_blocks"] += num_cached
            tail = None
            if admission.num_settled_tokens % size:
                tail = admission.block_ids[num_cached]
                require(tail in copied, "H5", "a prefix ends inside a block that is no copy")
                self.counters["forks"] += 1
            self.slots[admission.slot] = Slot(
                incarnation=admission.incarnation,
                token_ids=list(admission.token_ids),
                num_prompt_tokens=admission.num_prompt_tokens,
                sampling=admission.sampling,
                block_ids=list(admission.block_ids),
                next_position=admission.num_settled_tokens,
                copy=None if tail is None else (copied[tail], tail),
            )
        for slot_id in plan.left_slots:
            require(slot_id in self.decode_set, "B7", f"slot {slot_id} leaves a set it is not in")
            del self.decode_set[slot_id]
        for slot_id in plan.joined_slots:
            require(slot_id in self.slots and slot_id not in self.decode_set, "B7", f"join of slot {slot_id}")
            self.decode_set[slot_id] = None

    def _check_blocks(self, blocks: list[int], own_slot: int | None) -> None:
        """A block may be handed out once the last step that named it has completed (rule E1)."""
        for block in blocks:
            require(0 <= block < self.limits.num_blocks, "E4", "block out of range")
            for slot_id, slot in self.slots.items():
                require(block not in slot.block_ids, "E4", f"block {block} is in the table of slot {slot_id}")
            for step in self.steps:
                for row in step.rows:
                    if row.slot != own_slot:
                        require(block not in row.block_ids, "E1", f"block {block} is named by step {step.step_id}")

    def _check_shared(self, blocks: list[int]) -> None:
        """A cached block is written no more: not by a row in flight, whoever's it is (rules H2, H5)."""
        for step in self.steps:
            for row in step.rows:
                first = row.start // self.limits.block_size
                last = (row.start + row.count - 1) // self.limits.block_size
                written = set() if row.done else set(row.block_ids[first : last + 1])
                require(written.isdisjoint(blocks), "H2", f"a shared block is written by step {step.step_id}")

    def _rows(self, plan: worker_pb2.StepPlan) -> list[Row]:
        explicit = list(zip(plan.row_slots, plan.row_starts, plan.row_counts, plan.row_samples, strict=True))
        named = {slot for slot, _, _, _ in explicit}
        out = set(plan.sit_out_slots)
        require(out <= set(self.decode_set), "B7", "sit_out of a slot outside the decode set")
        members = [slot for slot in self.decode_set if slot not in named and slot not in out]
        decode = [(slot, self.slots[slot].next_position, 1, True) for slot in members]
        return [self._row(*columns) for columns in explicit + decode]

    def _row(self, slot_id: int, start: int, count: int, samples: bool) -> Row:
        require(slot_id in self.slots, "B7", f"row for empty slot {slot_id}")
        slot = self.slots[slot_id]
        if start != slot.next_position:
            require(slot.refeed and start < slot.next_position, "A4", f"slot {slot_id} feeds {start}")
        slot.refeed = False
        end = start + count
        require(end <= self.limits.max_model_len, "A6", f"position {end - 1}")
        require(
            end <= len(slot.block_ids) * self.limits.block_size, "A6", f"slot {slot_id} has no block for {end - 1}"
        )
        require(end - 1 <= len(slot.token_ids) or count == 1, "A5", "a chunk beyond the history")
        slot.next_position = end
        return Row(slot_id, slot, start, count, samples, list(slot.block_ids))

    # ---------------------------------------------------------------------------------------- device

    def runnable(self) -> list[Row]:
        """Rows that may run now: the oldest unfinished row of each slot."""
        first: dict[int, Row] = {}
        for step in self.steps:
            for row in step.rows:
                if not row.done and not step.failed and row.slot not in first:
                    first[row.slot] = row
        return list(first.values())

    def run(self, row: Row) -> None:
        """Runs one row: reads its context, writes its KV, samples. The slot may have been released meanwhile."""
        row.done = True
        slot = row.state
        size = self.limits.block_size
        self._copy_tail(slot)
        places = [(row.block_ids[p // size], p % size) for p in range(row.start + row.count)]
        context = fold([self.memory.get(place, POISON) for place in places[: row.start]])
        for position in range(row.start, row.start + row.count):
            token = self._input_token(slot, position)
            if token is None:
                row.fault = worker_pb2.RowError.CODE_POSITION_MISMATCH
                self.counters["holes"] += 1
                break
            tag = tag_of(context, token, position)
            block = places[position][0]
            sharers = sum(block in other.block_ids for other in self.slots.values() if other is not slot)
            require(sharers == 0 or slot not in self.slots.values(), "H5", f"block {block} is written and shared")
            self.memory[places[position]] = tag
            context = mix(context, tag)
        else:
            if row.samples:
                self._sample(row, slot, context)
        if row.samples and row.token is None:
            slot.refeed = True

    def _copy_tail(self, slot: Slot) -> None:
        if slot.copy is None:
            return
        source, destination = slot.copy
        slot.copy = None
        for offset in range(self.limits.block_size):
            self.memory[destination, offset] = self.memory.get((source, offset), POISON)

    @staticmethod
    def _input_token(slot: Slot, position: int) -> int | None:
        if position < len(slot.token_ids):
            return slot.token_ids[position]
        if slot.cell is None or slot.cell[1] != position:
            return None
        return slot.cell[0]

    def _sample(self, row: Row, slot: Slot, context: int) -> None:
        skip, nan, _ = self.rates
        draw = self.rng.random()
        if draw < skip:
            self.counters["skips"] += 1
            return
        if draw < skip + nan:
            self.counters["nans"] += 1
            row.fault = worker_pb2.RowError.CODE_NON_FINITE
            return
        end = row.start + row.count
        row.token = next_token(
            context,
            seed=slot.sampling.seed,
            output_index=end - slot.num_prompt_tokens,
            vocab=self.vocab,
            suppressed=tuple(slot.sampling.suppressed_token_ids),
            min_tokens=slot.sampling.min_tokens,
        )
        slot.cell = (row.token, end)

    def completed(self) -> worker_pb2.RunStepsResponse | None:
        """The event of the oldest step if it has ended: a boundary, or StepFailed."""
        if not self.steps:
            return None
        step = self.steps[0]
        if step.failed:
            self.steps.popleft()
            for row in step.rows:
                row.state.refeed = True
            return worker_pb2.RunStepsResponse(
                failed=worker_pb2.StepFailed(step_id=step.step_id, scope=worker_pb2.StepFailed.SCOPE_STEP)
            )
        if not all(row.done for row in step.rows):
            return None
        self.steps.popleft()
        return worker_pb2.RunStepsResponse(boundary=self._boundary(step))

    def _boundary(self, step: FakeStep) -> worker_pb2.StepBoundary:
        counts = [int(row.token is not None) for row in step.rows]
        completion = worker_pb2.StepCompletion(
            slots=[row.slot for row in step.rows],
            incarnations=[row.state.incarnation for row in step.rows],
            token_counts=[] if all(counts) else counts,
            token_ids=[row.token for row in step.rows if row.token is not None],
            row_errors=[
                worker_pb2.RowError(slot=row.slot, incarnation=row.state.incarnation, code=row.fault)
                for row in step.rows
                if row.fault
            ],
        )
        return worker_pb2.StepBoundary(
            worker_epoch=self.epoch,
            completed_step_id=step.step_id,
            running_step_id=self.steps[0].step_id if self.steps else 0,
            queued_steps=len(self.steps),
            completion=completion,
        )
