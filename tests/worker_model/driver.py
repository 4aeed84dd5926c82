"""Drives a runner as an executor would: sequences, shuffled blocks, mixed batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stepahead.worker.runner import LAST_SAMPLE, CacheShape, SampleStatus, SamplingColumns, StepBatch

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "choice_index": 0}


@dataclass
class Sequence:
    """One sequence in a slot."""

    slot: int
    prompt: list[int]
    blocks: list[int]
    sampling: dict = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    num_fed: int = 0
    suppressed: np.ndarray | None = None
    mask: np.ndarray | None = None

    @property
    def decoding(self):
        return self.num_fed >= len(self.prompt)


class Driver:
    """Holds the sequences of a runner and builds its batches."""

    def __init__(self, runner, *, num_slots=8, num_blocks=64, block_size=4, max_model_len=128, seed=0):
        self.facts = runner.load(lambda what, done, total: None)
        self.runner = runner
        self.block_size = block_size
        self.blocks_per_seq = -(-max_model_len // block_size)
        self.rng = np.random.default_rng(seed)
        self.step_id = 0
        self.free_blocks = self.rng.permutation(num_blocks).tolist()
        self.free_slots = list(range(num_slots))
        self.new_slots = []
        runner.allocate(
            CacheShape(
                num_slots=num_slots,
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                max_num_batched_tokens=512,
                max_num_seqs=num_slots,
            )
        )

    def admit(self, prompt, *, num_tokens=None, suppressed=None, mask=None, **sampling):
        """Admits a prompt, with blocks for `num_tokens` positions."""
        need = -(-num_tokens // self.block_size) if num_tokens else self.blocks_per_seq
        blocks = [self.free_blocks.pop() for _ in range(need)]
        seq = Sequence(self.free_slots.pop(), list(prompt), blocks, {**GREEDY, **sampling})
        seq.suppressed, seq.mask = suppressed, mask
        self.new_slots.append(seq.slot)
        return seq

    def release(self, seq):
        """Gives back slot and blocks."""
        self.free_blocks += seq.blocks
        self.free_slots.append(seq.slot)

    def batch(self, rows, *, positions=None, **extra):
        """Builds a batch from (sequence, token count) pairs; `positions` overrides first positions by row."""
        token_ids, places, slots, starts, lens, tables, sample_rows = [], [], [], [0], [], [], []
        for row, (seq, count) in enumerate(rows):
            first = (positions or {}).get(row, seq.num_fed)
            history = seq.prompt[first : first + count]
            token_ids += history if history else [LAST_SAMPLE]
            places += range(first, first + count)
            slots += [
                seq.blocks[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(first, first + count)
            ]
            starts.append(len(places))
            lens.append(first + count)
            tables.append(seq.blocks + [0] * (self.blocks_per_seq - len(seq.blocks)))
            if first + count >= len(seq.prompt):
                sample_rows.append(row)
        sampled = [rows[row][0] for row in sample_rows]
        self.step_id += 1
        new, self.new_slots = self.new_slots, []
        return StepBatch(
            step_id=self.step_id,
            slots=np.array([seq.slot for seq, _ in rows], np.int32),
            token_ids=np.array(token_ids, np.int64),
            positions=np.array(places, np.int64),
            query_start_loc=np.array(starts, np.int32),
            seq_lens=np.array(lens, np.int32),
            block_tables=np.array(tables, np.int32).reshape(len(rows), self.blocks_per_seq),
            slot_mapping=np.array(slots, np.int64),
            sample_rows=np.array(sample_rows, np.int32),
            sampling=columns(sampled),
            invalidated_slots=np.array(new, np.int32),
            **extra,
        )

    def step(self, rows, **extra):
        """Runs one step and books its samples; returns the statuses by row sampled."""
        batch = self.batch(rows, **extra)
        self.runner.forward(batch)
        samples = self.runner.sample(batch)
        for seq, count in rows:
            seq.num_fed += count
        for index, row in enumerate(batch.sample_rows):
            seq = rows[row][0]
            seq.statuses.append(int(samples.status[index]))
            if samples.status[index] == SampleStatus.OK:
                seq.outputs.append(int(samples.token_ids[index]))
        return samples.status.tolist()

    def run(self, seqs, num_outputs, *, chunk=64, shuffle=True):
        """Runs sequences to `num_outputs` outputs each, prompts in chunks, rows in random order."""
        while pending := [seq for seq in seqs if len(seq.outputs) < num_outputs]:
            order = self.rng.permutation(len(pending)) if shuffle else range(len(pending))
            rows = [pending[i] for i in order]
            self.step([(seq, min(chunk, len(seq.prompt) - seq.num_fed) if not seq.decoding else 1) for seq in rows])
        return [seq.outputs for seq in seqs]


def columns(seqs):
    """Sampling columns of the sequences' next outputs."""

    def column(name, dtype):
        return np.array([seq.sampling[name] for seq in seqs], dtype)

    return SamplingColumns(
        temperature=column("temperature", np.float32),
        top_p=column("top_p", np.float32),
        top_k=column("top_k", np.int32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.uint64),
        choice_index=column("choice_index", np.int64),
        output_index=np.array([len(seq.outputs) for seq in seqs], np.int64),
        suppressed=tuple(seq.suppressed for seq in seqs),
        masks=tuple(seq.mask for seq in seqs),
    )
