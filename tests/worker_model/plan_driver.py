"""Drives a runner by step plans, through the worker's own checks and tables, some steps ahead of their results."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stepahead.worker.plan_check import check_plan
from stepahead.worker.runner import CacheShape, RowLogprobs, Runner, SampleStatus, StepBatch, StepSamples
from stepahead.worker.slot_table import SlotTable
from stepahead.worker.step_batch import BatchBuilder
from tests.worker import plans

SHAPE = CacheShape(
    num_slots=8, num_blocks=128, block_size=4, max_model_len=64, max_num_batched_tokens=256, max_num_seqs=8
)
BLOCKS_PER_SLOT = SHAPE.max_model_len // SHAPE.block_size


@dataclass
class Asked:
    """What to generate from; `outputs` were generated elsewhere. `sampling` are fields of SlotSampling."""

    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)


class Entry(NamedTuple):
    """Log probability of the token at a position."""

    position: int
    value: float
    rank: int
    top_ids: list[int]
    top_values: list[float]


@dataclass
class Generated:
    """What came back for one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    prompt_logprobs: list[Entry] = field(default_factory=list)


class PlanDriver:
    """A loaded runner and the worker's tables for it."""

    def __init__(self, runner: Runner, shape: CacheShape = SHAPE) -> None:
        self.vocab_size = runner.load(lambda what, done, total: None).vocab_size
        runner.allocate(shape)
        self.runner = runner
        self.table = SlotTable(shape)
        self.builder = BatchBuilder(self.table)
        self.step_id = 0
        self._incarnation = 1000

    def build(self, **fields: Any) -> StepBatch:
        """Checks and applies the next plan; its arrays."""
        self.step_id += 1
        message = plans.plan(self.step_id, **fields)
        edits = check_plan(message, self.table, vocab_size=self.vocab_size)
        edits.apply(self.table, self.step_id)
        return self.builder.build(self.step_id, edits)[0]

    def execute(self, batch: StepBatch) -> StepSamples:
        """Runs a step."""
        self.runner.forward(batch)
        return self.runner.sample(batch)

    def admission(self, slot: int, asked: Asked, **fields: Any):
        """An admission with blocks for every position."""
        self._incarnation += 1
        first = slot * BLOCKS_PER_SLOT
        return plans.admission(
            slot,
            asked.prompt + asked.outputs,
            incarnation=self._incarnation,
            block_ids=list(range(first, first + BLOCKS_PER_SLOT)),
            num_prompt_tokens=len(asked.prompt),
            sampling=plans.sampling(**asked.sampling),
            **fields,
        )

    def generate(self, asked: list[Asked], num_outputs: int, *, chunk: int = 16, ahead: int = 0) -> list[Generated]:
        """Generates until each sequence has `num_outputs` outputs, those generated elsewhere included.

        Args:
            asked: one sequence per slot.
            num_outputs: of each.
            chunk: prompt tokens per step.
            ahead: steps built before the oldest one's tokens exist.
        """
        results = [Generated() for _ in asked]
        fed = [0] * len(asked)
        admissions = [self.admission(slot, one) for slot, one in enumerate(asked)]
        built: deque[StepBatch] = deque()
        while any(
            len(one.outputs) + len(result.tokens) < num_outputs for one, result in zip(asked, results, strict=True)
        ):
            while len(built) <= ahead:
                built.append(self._next_step(asked, fed, chunk, admissions))
                admissions = []
            batch = built.popleft()
            self._book(batch, self.execute(batch), results)
        released = list(range(len(asked)))
        for slot in released:
            self.table.release(slot)
        self.table.members = self.table.members[:0]
        for one, result in zip(asked, results, strict=True):
            wanted = num_outputs - len(one.outputs)
            del result.tokens[wanted:], result.logprobs[wanted:]
        return results

    def _next_step(self, asked, fed, chunk, admissions):
        rows, joined, decode = [], [], 0
        for slot, one in enumerate(asked):
            length = len(one.prompt) + len(one.outputs)
            if fed[slot] == length:
                decode += 1
                continue
            count = min(chunk, length - fed[slot])
            ends = fed[slot] + count == length
            rows.append((slot, fed[slot], count, ends))
            fed[slot] += count
            joined += [slot] if ends else []
        return self.build(rows=rows, decode=decode, admissions=admissions, joined_slots=joined)

    def _book(self, batch: StepBatch, samples: StepSamples, results: list[Generated]) -> None:
        for index, row in enumerate(batch.sample_rows.tolist()):
            assert samples.status[index] == SampleStatus.OK
            results[int(batch.slots[row])].tokens.append(int(samples.token_ids[index]))
        for slot, entry in entries_of(batch, samples.output_logprobs):
            results[slot].logprobs.append(entry)
        for slot, entry in entries_of(batch, samples.prompt_logprobs):
            results[slot].prompt_logprobs.append(entry)


def entries_of(batch: StepBatch, logprobs: RowLogprobs | None) -> list[tuple[int, Entry]]:
    """Columns of a step as (slot, entry) pairs."""
    if logprobs is None:
        return []
    entries = logprobs.entries
    top = iter(zip(entries.top_ids.tolist(), entries.top_values.tolist(), strict=True))
    columns = iter(zip(entries.values.tolist(), entries.ranks.tolist(), entries.top_counts.tolist(), strict=True))
    found: list[tuple[int, Entry]] = []
    places = zip(logprobs.rows, logprobs.first_positions, logprobs.entry_counts, strict=True)
    for row, first, count in places:
        for position in range(int(first), int(first + count)):
            value, rank, num_top = next(columns)
            pairs = [next(top) for _ in range(num_top)]
            entry = Entry(position, value, rank, [pair[0] for pair in pairs], [pair[1] for pair in pairs])
            found.append((int(batch.slots[row]), entry))
    assert next(columns, None) is None
    assert next(top, None) is None
    return found
