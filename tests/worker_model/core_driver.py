"""Drives a runner by the scheduler's core: its plans, through wire messages and the worker's checks and tables."""

from __future__ import annotations

from collections import deque

import numpy as np

from stepahead.scheduler.convert import lane_config_from_proto, plan_to_proto
from stepahead.scheduler.core import (
    LaneId,
    Request,
    RequestKey,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from stepahead.scheduler.core.invariants import check_invariants
from stepahead.worker.convert import worker_info_message
from stepahead.worker.plan_check import check_plan
from stepahead.worker.runner import CacheShape, ModelFacts, Runner, SampleStatus
from stepahead.worker.slot_table import SlotTable
from stepahead.worker.step_batch import BatchBuilder

LANE = LaneId(0)


class CoreDriver:
    """A scheduler with one lane, and the worker of that lane without threads and sockets.

    Args:
        runner: loaded and allocated.
        facts: what it said when it was loaded.
        shape: what it was allocated with.
    """

    def __init__(self, runner: Runner, facts: ModelFacts, shape: CacheShape, **policy):
        self.runner, self.facts, self.shape = runner, facts, shape
        self.scheduler = Scheduler(SchedulerConfig(**policy))
        self.outputs: dict[int, list[int]] = {}
        self.epoch = 0
        self.most_blocks = [0] * len(shape.groups)
        """Blocks that were ever named at once, by group."""
        self._open()

    def add(self, key: int, prompt: list[int], max_tokens: int, **fields) -> None:
        """Adds a greedy request."""
        request = Request(key=RequestKey(key), prompt_token_ids=tuple(prompt), max_tokens=max_tokens, **fields)
        self.scheduler.add_request(request)
        self.outputs[key] = []

    def lose(self) -> None:
        """The worker forgets everything and comes back."""
        self.scheduler.lose_lane(LANE)
        self.runner.reset()
        self._open()

    def run(self, *, max_commits: int | None = None) -> dict[int, list[int]]:
        """Commits steps until nothing is left, or so many; returns all outputs so far."""
        while max_commits is None or max_commits > 0:
            while (plan := self.scheduler.plan(LANE).plan) is not None:
                check_invariants(self.scheduler)
                self.steps.append(self._execute(plan))
            if not self.steps:
                break
            self._commit(self.steps.popleft())
            max_commits = None if max_commits is None else max_commits - 1
        return self.outputs

    def _open(self) -> None:
        self.epoch += 1
        info = worker_info_message(self.facts, self.shape, worker_instance_id="", max_overlap_depth=2, version="")
        self.scheduler.open_lane(LANE, lane_config_from_proto(info.limits), self.epoch)
        self.table = SlotTable(self.shape)
        self.builder = BatchBuilder(self.table)
        self.steps: deque[StepResult] = deque()

    def _execute(self, plan: StepPlan) -> StepResult:
        edits = check_plan(plan_to_proto(plan), self.table, vocab_size=self.facts.vocab_size)
        edits.apply(self.table, plan.step_id)
        batch, rows = self.builder.build(plan.step_id, edits)
        self.runner.forward(batch)
        samples = self.runner.sample(batch)
        assert (samples.status == SampleStatus.OK).all()
        tables = [batch.block_tables, *(group.block_tables for group in batch.more_groups)]
        for group, table in enumerate(tables):
            used = np.arange(table.shape[1]) < -(-batch.seq_lens // self.shape.block_size)[:, None]
            named = len(np.unique(table[used & (table >= 0)]))
            self.most_blocks[group] = max(self.most_blocks[group], named)
        counts = np.zeros(len(rows.slots), np.int64)
        counts[rows.sample_rows] = 1
        return StepResult(
            epoch=self.epoch,
            step_id=plan.step_id,
            incarnations=list(rows.incarnations),
            token_counts=counts.tolist(),
            token_ids=samples.token_ids.tolist(),
            faults={},
        )

    def _commit(self, result: StepResult) -> None:
        outcome = self.scheduler.commit(LANE, result)
        check_invariants(self.scheduler)
        for key, token in zip(outcome.keys, outcome.token_ids, strict=True):
            self.outputs[key].append(token)
