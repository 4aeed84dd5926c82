"""A worker with tagged memory that speaks the wire messages and nothing else.

Reads and writes take place over an interval: the rows of a dispatched step run one by one at times the
simulation picks, anywhere between dispatch and completion, in order per slot but in any order across slots. Memory
that was given away too early therefore is read or overwritten by its old owner, and a token changes.

A constrained row feeds its positions as others do; its sample waits for the gate of its step, or until the gate is
overdue.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from stepahead.v1 import worker_pb2
from tests.simulation.tagged_model import POISON, TaggedModel, next_token


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
    tables: list[list[int]]
    """Per KV group. Entries that left a window are void: their blocks may be somebody else's now."""
    next_position: int
    num_settled: int = 0
    """Positions that layers which see everything had at admission: nobody writes them (rules H5, N6)."""
    constrained: bool = False
    replay: tuple[int, int] | None = None
    """(start, end) of the positions that are fed again for groups with a window alone."""
    cell: tuple[int, int] | None = None
    copy: tuple[int, int] | None = None
    """(source, destination) of a block copy that is made just before the slot's first row runs."""
    refeed: bool = False
    """The last row came back empty: its position may be fed again."""
    lowest_lost: int | None = None
    """The first position whose row came back empty."""


@dataclass
class Gate:
    """Of one step: what its constrained rows wait for."""

    masks: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """By slot; a row without one was told to skip."""
    arrived: bool = False
    overdue: bool = False
    """It was waited for long enough: its rows sample nothing (rule I2)."""

    @property
    def is_open(self) -> bool:
        return self.arrived or self.overdue


@dataclass
class Row:
    """One row of one step, with everything it needs frozen at dispatch."""

    slot: int
    state: Slot
    start: int
    count: int
    samples: bool
    tables: list[list[int | None]]
    """Null: before the window of the row's first position, or before its replay."""
    replay_start: int | None = None
    """Of the replay that it belongs to."""
    gate: Gate | None = None
    """What its sample waits for."""
    context: int | None = None
    """What its next token follows from, once its positions are fed."""
    fed: bool = False
    done: bool = False
    token: int | None = None
    fault: int = 0


@dataclass
class FakeStep:
    step_id: int
    rows: list[Row]
    gate: Gate
    failed: bool = False
    pending: list[Row] = field(default_factory=list)

    @property
    def constrained(self) -> dict[int, Row]:
        """By slot."""
        return {row.slot: row for row in self.rows if row.gate is not None}


class FakeWorker:
    """See the module docstring. Faults are drawn from `rng` with the given probabilities."""

    def __init__(
        self,
        limits: worker_pb2.WorkerLimits,
        *,
        overlap_depth: int,
        epoch: int,
        vocab: int,
        model: TaggedModel,
        rng: random.Random,
        skip_rate: float = 0.0,
        nan_rate: float = 0.0,
        fail_rate: float = 0.0,
    ) -> None:
        self.limits = limits
        self.depth = overlap_depth
        self.epoch = epoch
        self.vocab = vocab
        self.model = model
        self.rng = rng
        self.rates = (skip_rate, nan_rate, fail_rate)
        self.slots: dict[int, Slot] = {}
        self.decode_set: dict[int, None] = {}
        self.memory: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """By group, block and offset."""
        self.poison = (POISON,) * model.num_layers
        self.num_blocks = [group.num_blocks for group in limits.kv_groups] or [limits.num_blocks]
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
        gate = Gate()
        rows = self._rows(plan)
        for row in rows:
            row.gate = gate if row.samples and row.state.constrained else None
        require(sum(r.count for r in rows) == plan.total_tokens, "M3", "total_tokens")
        require(len(rows) == plan.total_rows, "M3", "total_rows")
        require(plan.total_tokens <= self.limits.max_num_batched_tokens, "M3", "token budget")
        require(len(rows) <= self.limits.max_num_seqs, "M3", "row budget")
        require(bool(rows), "B9", "a plan without rows")
        step = FakeStep(plan.step_id, rows, gate, pending=list(rows))
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
        groups = plan.append_groups or [0] * len(plan.append_slots)
        for slot_id, count, group in zip(plan.append_slots, plan.append_counts, groups, strict=True):
            blocks = list(plan.append_block_ids[cursor : cursor + count])
            cursor += count
            self._check_blocks(group, blocks, slot_id)
            require(slot_id in self.slots, "B7", f"append to empty slot {slot_id}")
            self.slots[slot_id].tables[group] += blocks
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
            replay = self._admitted_replay(admission)
            tables = self._admitted_tables(admission, num_cached)
            self.counters["cached_blocks"] += num_cached
            tail = None
            if admission.num_settled_tokens % size and (replay is None or 0 in self.model.windows):
                tail = tables[0][num_cached]
                require(tail in copied, "H5", "a prefix ends inside a block that is no copy")
                self.counters["forks"] += 1
            self.slots[admission.slot] = Slot(
                incarnation=admission.incarnation,
                token_ids=list(admission.token_ids),
                num_prompt_tokens=admission.num_prompt_tokens,
                sampling=admission.sampling,
                tables=tables,
                next_position=admission.num_settled_tokens if replay is None else replay[0],
                num_settled=admission.num_settled_tokens,
                constrained=admission.constrained,
                replay=replay,
                copy=None if tail is None else (copied[tail], tail),
            )
        for slot_id in plan.left_slots:
            require(slot_id in self.decode_set, "B7", f"slot {slot_id} leaves a set it is not in")
            del self.decode_set[slot_id]
        for slot_id in plan.joined_slots:
            require(slot_id in self.slots and slot_id not in self.decode_set, "B7", f"join of slot {slot_id}")
            self.decode_set[slot_id] = None

    def _admitted_replay(self, admission: worker_pb2.SlotAdmission) -> tuple[int, int] | None:
        if not admission.HasField("replay_start"):
            return None
        start, end = admission.replay_start, admission.num_settled_tokens
        require(self.limits.replays_windows, "N6", "a replay on a worker that has none")
        require(start % self.limits.block_size == 0, "N7", f"a replay from {start} on, inside a block")
        require(end - start >= max(1, *(window - 1 for window in self.model.windows)), "N7", "no whole window")
        self.counters["replays"] += 1
        return start, end

    def _admitted_tables(self, admission: worker_pb2.SlotAdmission, num_cached: int) -> list[list[int]]:
        """The block tables of a newcomer, their cached and their new blocks checked."""
        num_groups = len(self.model.windows)
        counts = list(admission.block_counts) or [len(admission.block_ids)]
        nulls = list(admission.null_counts) or [0] * num_groups
        require(len(counts) == len(nulls) == num_groups, "B7", "block_counts or null_counts do not fit the groups")
        require(sum(counts) == len(admission.block_ids), "B7", "block_counts do not fit block_ids")
        tables: list[list[int]] = []
        start = 0
        for group, (count, num_null) in enumerate(zip(counts, nulls, strict=True)):
            blocks = list(admission.block_ids[start : start + count])
            start += count
            num_shared = num_cached - num_null
            most_null = self._num_needless(group, admission.num_settled_tokens)
            if admission.HasField("replay_start") and self.model.windows[group]:
                num_shared, most_null = 0, admission.replay_start // self.limits.block_size
            require(num_null <= most_null, "N3", "a needed entry is null")
            self._check_shared(group, blocks[:num_shared])
            self._check_blocks(group, blocks[num_shared:], None)
            self.counters["window_hits"] += num_null > 0
            tables.append([-1] * num_null + blocks)
        return tables

    def _num_needless(self, group: int, position: int) -> int:
        """Entries that no row reads whose first position is `position` (rule N1)."""
        window = self.model.windows[group]
        return max(0, position - window + 1) // self.limits.block_size if window else 0

    def _needed(self, slot: Slot, group: int) -> list[int]:
        """The entries of a table that rows in flight or to come may read."""
        lowest = slot.next_position if slot.lowest_lost is None else min(slot.next_position, slot.lowest_lost)
        starts = [row.start for step in self.steps for row in step.rows if row.state is slot]
        return slot.tables[group][self._num_needless(group, min([lowest, *starts])) :]

    def _check_blocks(self, group: int, blocks: list[int], own_slot: int | None) -> None:
        """A block may be handed out once the last step that named it has completed (rule E1)."""
        for block in blocks:
            require(0 <= block < self.num_blocks[group], "E4", "block out of range")
            for slot_id, slot in self.slots.items():
                require(block not in self._needed(slot, group), "E4", f"block {block} is in use by slot {slot_id}")
            for step in self.steps:
                for row in step.rows:
                    if row.slot != own_slot:
                        named = row.tables[group]
                        require(block not in named, "E1", f"block {block} is named by step {step.step_id}")

    def _check_shared(self, group: int, blocks: list[int]) -> None:
        """A cached block is written no more: not by a row in flight, whoever's it is (rules H2, H5)."""
        for step in self.steps:
            for row in step.rows:
                first = row.start // self.limits.block_size
                last = (row.start + row.count - 1) // self.limits.block_size
                idle = row.done or not self._keeps(row, group)
                written = set() if idle else set(row.tables[group][first : last + 1])
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
            slot.lowest_lost = None
        slot.refeed = False
        end = start + count
        require(end <= self.limits.max_model_len, "A6", f"position {end - 1}")
        for table in slot.tables:
            room = len(table) * self.limits.block_size
            require(end <= room, "A6", f"slot {slot_id} has no block for {end - 1}")
        require(end - 1 <= len(slot.token_ids) or count == 1, "A5", "a chunk beyond the history")
        slot.next_position = end
        replay_start = None
        if slot.replay is not None and start < slot.replay[1]:
            replay_start = slot.replay[0]
            require(end <= slot.replay[1] and not samples, "N5", f"a row of a replay samples or goes on to {end}")
        tables: list[list[int | None]] = []
        for group, table in enumerate(slot.tables):
            num_null = self._num_needless(group, start)
            if replay_start is not None and self.model.windows[group]:
                num_null = max(num_null, replay_start // self.limits.block_size)
            tables.append([*[None] * num_null, *table[num_null:]])
            self.counters["null_rows"] += num_null > 0
        return Row(slot_id, slot, start, count, samples, tables, replay_start)

    # ---------------------------------------------------------------------------------------- gates

    def take_gate(self, gate: worker_pb2.SampleGate) -> None:
        """Masks for a step accepted before; they overtake whatever is queued. A second one changes nothing."""
        require(gate.step_id <= self.last_accepted, "I3", f"a gate of step {gate.step_id}, which was not accepted")
        step = next((step for step in self.steps if step.step_id == gate.step_id), None)
        if step is None:
            self.counters["late_gates"] += 1
            return
        rows = step.constrained
        named = dict(zip(gate.slots, zip(gate.incarnations, gate.positions, strict=True), strict=True))
        fed_last = {slot: (row.state.incarnation, row.start + row.count - 1) for slot, row in rows.items()}
        require(named == fed_last, "I3", f"a gate of step {step.step_id} for {named}, its rows are {fed_last}")
        if step.gate.is_open:
            self.counters["late_gates"] += 1
            return
        step.gate.arrived = True
        masks = iter(gate.masks)
        for slot, verdict in zip(gate.slots, gate.verdicts, strict=True):
            if verdict == worker_pb2.SampleGate.VERDICT_SKIP:
                self.counters["gate_skips"] += 1
                continue
            require(verdict == worker_pb2.SampleGate.VERDICT_MASK, "I3", f"verdict {verdict}")
            self.counters["gate_masks"] += 1
            step.gate.masks[slot] = self._unpacked(next(masks))
        require(next(masks, None) is None, "I3", "a mask for nobody")

    def _unpacked(self, mask: bytes) -> frozenset[int]:
        require(len(mask) == -(-self.vocab // 8), "I3", f"a mask of {len(mask)} bytes")
        return frozenset(token for token in range(self.vocab) if mask[token >> 3] >> (token & 7) & 1)

    @property
    def overdue(self) -> Gate | None:
        """The gate that holds the oldest step up, if nothing else does."""
        step = self.steps[0] if self.steps else None
        if step is None or step.failed or step.gate.is_open or not step.constrained:
            return None
        return step.gate if all(row.fed for row in step.rows) else None

    def end_wait(self) -> None:
        """The oldest step has waited for its gate for long enough."""
        gate = self.overdue
        assert gate is not None
        gate.overdue = True

    # ---------------------------------------------------------------------------------------- device

    def runnable(self) -> list[Row]:
        """Rows that may run now: the oldest unfinished row of each slot, unless it waits for a gate."""
        first: dict[int, Row] = {}
        for step in self.steps:
            for row in step.rows:
                if not row.done and not step.failed and row.slot not in first:
                    first[row.slot] = row
        return [row for row in first.values() if not row.fed or row.gate is None or row.gate.is_open]

    def run(self, row: Row) -> None:
        """Runs one row: feeds its positions, then samples. The slot may have been released meanwhile."""
        if not row.fed:
            self._feed(row)
        if row.gate is not None and not row.gate.is_open:
            self.counters["waits_for_gates"] += 1
            return
        row.done = True
        slot = row.state
        if row.samples and row.context is not None:
            self._sample(row, slot, row.context)
        if row.samples and row.token is None:
            slot.refeed = True
            lost = row.start + row.count - 1
            slot.lowest_lost = lost if slot.lowest_lost is None else min(slot.lowest_lost, lost)

    def _feed(self, row: Row) -> None:
        """Reads a row's context and writes its KV."""
        row.fed = True
        slot = row.state
        self._copy_tail(slot)
        state = 0
        for position in range(row.start, row.start + row.count):
            token = self._input_token(slot, position)
            if token is None:
                row.fault = worker_pb2.RowError.CODE_POSITION_MISMATCH
                self.counters["holes"] += 1
                return
            tags, state = self.model.feed(
                token,
                position,
                lambda group, earlier: self.memory.get(self._place(row, group, earlier), self.poison),
                row.replay_start,
            )
            for group, tag in enumerate(tags):
                if self._keeps(row, group):
                    is_new = self.model.windows[group] or position >= slot.num_settled
                    require(bool(is_new), "H5", f"position {position} of a cached prefix is written")
                    self._write(row, self._place(row, group, position), tag)
        row.context = state

    def _keeps(self, row: Row, group: int) -> bool:
        """Whether a row writes a group: a replay only those with a window (rule N6)."""
        return row.replay_start is None or self.model.windows[group] > 0

    def _place(self, row: Row, group: int, position: int) -> tuple[int, int, int]:
        size = self.limits.block_size
        block = row.tables[group][position // size]
        require(
            block is not None and block >= 0, "N3", f"position {position} of group {group} is read through null"
        )
        assert block is not None
        return group, block, position % size

    def _write(self, row: Row, place: tuple[int, int, int], tag: tuple[int, ...]) -> None:
        group, block, _ = place
        others = [slot for slot in self.slots.values() if slot is not row.state]
        sharers = sum(block in self._needed(other, group) for other in others)
        is_live = len(others) < len(self.slots)
        require(sharers == 0 or not is_live, "H5", f"block {block} is written and shared")
        self.memory[place] = tag

    def _copy_tail(self, slot: Slot) -> None:
        if slot.copy is None:
            return
        source, destination = slot.copy
        slot.copy = None
        for offset in range(self.limits.block_size):
            self.memory[0, destination, offset] = self.memory.get((0, source, offset), self.poison)

    @staticmethod
    def _input_token(slot: Slot, position: int) -> int | None:
        if position < len(slot.token_ids):
            return slot.token_ids[position]
        if slot.cell is None or slot.cell[1] != position:
            return None
        return slot.cell[0]

    def _sample(self, row: Row, slot: Slot, context: int) -> None:
        allowed = None
        if row.gate is not None:
            allowed = row.gate.masks.get(row.slot)
            if allowed is None:  # told to skip, or told nothing
                row.fault = worker_pb2.RowError.CODE_GATE_MISSING if row.gate.overdue else 0
                return
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
            choice_index=slot.sampling.choice_index,
            output_index=end - slot.num_prompt_tokens,
            vocab=self.vocab,
            suppressed=tuple(slot.sampling.suppressed_token_ids),
            min_tokens=slot.sampling.min_tokens,
            allowed=allowed,
        )
        if row.token is None:
            self.counters["nothing_allowed"] += 1
            row.fault = worker_pb2.RowError.CODE_NOTHING_ALLOWED
            return
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
                lost = row.state.lowest_lost
                row.state.lowest_lost = row.start if lost is None else min(lost, row.start)
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
