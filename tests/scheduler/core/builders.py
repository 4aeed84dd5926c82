"""Small explicit schedulers for example tests, and a driver that plays the worker's bookkeeping.

The driver derives the rows of a step from the plans alone, the way worker.proto tells a worker to: releases,
admissions, left, joined, then explicit rows and the rest of the decode set. It never looks at the core's steps in
flight, so a plan that does not say what the core meant shows as a `StepMismatch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepahead.scheduler.core import (
    CommitOutcome,
    Incarnation,
    LaneConfig,
    LaneId,
    PlanOutcome,
    Request,
    RequestKey,
    RowFault,
    Scheduler,
    SchedulerConfig,
    SlotId,
    StepPlan,
    StepResult,
)
from stepahead.scheduler.core.invariants import check_invariants
from stepahead.scheduler.core.sequence import Sequence

LANE = LaneId(0)
OTHER_LANE = LaneId(1)
EOS = 2


def make_request(key: int, prompt: int | tuple[int, ...] = 4, *, max_tokens: int = 8, **fields: Any) -> Request:
    """A request; a prompt of `n` tokens is 100, 101, ... so that no prompt token is a stop id."""
    tokens = prompt if isinstance(prompt, tuple) else tuple(range(100, 100 + prompt))
    return Request(key=RequestKey(key), prompt_token_ids=tokens, max_tokens=max_tokens, **fields)


def make_lane_config(**sizes: Any) -> LaneConfig:
    """A lane of 4 rows, 8 slots, 16 tokens a step, 32 positions, 16 blocks of 4 tokens; `sizes` override."""
    defaults = {
        "max_num_seqs": 4,
        "num_slots": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 32,
        "num_blocks": 16,
        "block_size": 4,
    }
    return LaneConfig(**{**defaults, **sizes})


def make_scheduler(
    *, overlap_depth: int = 1, num_lanes: int = 1, policy: dict[str, Any] | None = None, **sizes: Any
) -> Scheduler:
    """A scheduler with lanes 0, 1, ... of equal size, epoch 1 each; without a prefix cache unless asked for."""
    scheduler = Scheduler(
        SchedulerConfig(overlap_depth=overlap_depth, **({"prefix_caching": False} | (policy or {})))
    )
    for index in range(num_lanes):
        scheduler.open_lane(LaneId(index), make_lane_config(**sizes), epoch=1)
    return scheduler


@dataclass(frozen=True)
class Row:
    """One row of one step, as a worker would see it."""

    slot: SlotId
    incarnation: Incarnation
    samples: bool


@dataclass
class WorkerBooks:
    """What the worker of one lane knows: who sits in which slot, the decode set, the rows of each step."""

    incarnations: dict[SlotId, Incarnation] = field(default_factory=dict[SlotId, Incarnation])
    decode_set: dict[SlotId, None] = field(default_factory=dict[SlotId, None])
    steps: deque[tuple[StepPlan, list[Row]]] = field(default_factory=deque[tuple[StepPlan, list[Row]]])

    def accept(self, plan: StepPlan) -> None:
        """Applies the deltas in protocol order and notes the rows."""
        for slot, incarnation in zip(plan.released_slots, plan.released_incarnations, strict=True):
            assert self.incarnations.pop(slot) == incarnation, "B6: release of another incarnation"
            self.decode_set.pop(slot, None)
        for admission in plan.admissions:
            assert admission.slot not in self.incarnations, "B6: the slot is occupied"
            self.incarnations[admission.slot] = admission.incarnation
        for slot in plan.left_slots:
            del self.decode_set[slot]
        for slot in plan.joined_slots:
            assert slot not in self.decode_set, "B7: joined twice"
            self.decode_set[slot] = None
        assert set(plan.sit_out_slots) <= set(self.decode_set), "B7: sit_out outside the decode set"
        away = {*plan.row_slots, *plan.sit_out_slots}
        rows = [
            Row(slot, self.incarnations[slot], samples)
            for slot, samples in zip(plan.row_slots, plan.row_samples, strict=True)
        ]
        rows += [Row(slot, self.incarnations[slot], samples=True) for slot in self.decode_set if slot not in away]
        assert len(rows) == plan.total_rows, "M3: total_rows"
        self.steps.append((plan, rows))


class Driver:
    """Calls a scheduler, keeps the workers' books, checks the invariants after every call."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.books = {lane_id: WorkerBooks() for lane_id in scheduler.lanes}
        self.outcome = PlanOutcome(None)
        """Of the newest `plan`."""

    @classmethod
    def of(cls, **sizes: Any) -> Driver:
        """A driver of `make_scheduler(**sizes)`."""
        return cls(make_scheduler(**sizes))

    def add(self, key: int, prompt: int | tuple[int, ...] = 4, *, max_tokens: int = 8, **fields: Any) -> RequestKey:
        """Adds `make_request(...)`."""
        request = make_request(key, prompt, max_tokens=max_tokens, **fields)
        self.scheduler.add_request(request)
        check_invariants(self.scheduler)
        return request.key

    def plan(self, lane_id: LaneId = LANE) -> StepPlan | None:
        """Plans a step and lets the books accept it."""
        self.outcome = self.scheduler.plan(lane_id)
        check_invariants(self.scheduler)
        if self.outcome.plan is not None:
            self.books[lane_id].accept(self.outcome.plan)
        return self.outcome.plan

    def must_plan(self, lane_id: LaneId = LANE) -> StepPlan:
        """As `plan`, where None would be a failure."""
        plan = self.plan(lane_id)
        assert plan is not None, "no plan"
        return plan

    def result(
        self,
        *tokens: int,
        lane_id: LaneId = LANE,
        empty: Collection[int] = (),
        faults: Mapping[int, RowFault] | None = None,
    ) -> StepResult:
        """The completion of the oldest step: one token per sampling row but those of slots in `empty`/`faults`."""
        plan, rows = self.books[lane_id].steps[0]
        faults = faults or {}
        silent = {*empty, *faults}
        counts = [int(row.samples and row.slot not in silent) for row in rows]
        assert len(tokens) == sum(counts), f"{sum(counts)} rows sample, {len(tokens)} tokens given"
        return StepResult(
            epoch=self.scheduler.lanes[lane_id].epoch,
            step_id=plan.step_id,
            incarnations=[row.incarnation for row in rows],
            token_counts=None if all(counts) else counts,
            token_ids=list(tokens),
            faults={row.incarnation: faults[row.slot] for row in rows if row.slot in faults},
        )

    def commit(
        self,
        *tokens: int,
        lane_id: LaneId = LANE,
        empty: Collection[int] = (),
        faults: Mapping[int, RowFault] | None = None,
    ) -> CommitOutcome:
        """Commits the oldest step with these tokens; see `result`."""
        outcome = self.scheduler.commit(lane_id, self.result(*tokens, lane_id=lane_id, empty=empty, faults=faults))
        self.books[lane_id].steps.popleft()
        check_invariants(self.scheduler)
        return outcome

    def fail(self, lane_id: LaneId = LANE) -> None:
        """The oldest step fails as a whole."""
        plan, _ = self.books[lane_id].steps.popleft()
        self.scheduler.fail_step(lane_id, self.scheduler.lanes[lane_id].epoch, plan.step_id)
        check_invariants(self.scheduler)

    def lose(self, lane_id: LaneId = LANE) -> list[int]:
        """Loses a lane; returns the keys that wait again."""
        lost = self.scheduler.lose_lane(lane_id)
        del self.books[lane_id]
        check_invariants(self.scheduler)
        return [preempted.key for preempted in lost]

    def reopen(self, lane_id: LaneId = LANE, *, epoch: int = 2, **sizes: Any) -> None:
        """Opens a lane with an empty batch."""
        self.scheduler.open_lane(lane_id, make_lane_config(**sizes), epoch)
        self.books[lane_id] = WorkerBooks()

    def sequence(self, key: int) -> Sequence:
        """The live sequence of a request."""
        return self.scheduler.sequences[RequestKey(key)]

    def outputs(self, key: int) -> list[int]:
        """Outputs committed so far."""
        sequence = self.sequence(key)
        return sequence.history[sequence.num_prompt_tokens :]

    def free_blocks(self, lane_id: LaneId = LANE) -> tuple[int, ...]:
        """Ids of the free blocks in the order in which they will be given out."""
        return self.scheduler.lanes[lane_id].blocks.free_ids()

    def window_table(self, key: int, group: int = 0) -> list[int | None]:
        """The table of a request's stay in a window group, null entries included."""
        stay = self.sequence(key).stay
        assert stay is not None, "no stay"
        table = stay.windows[group]
        return [*[None] * table.num_null, *table.block_ids]

    def free_window_blocks(self, group: int = 0, lane_id: LaneId = LANE) -> tuple[int, ...]:
        """Ids of the free blocks of a window group in the order in which they will be given out."""
        windows = self.scheduler.lanes[lane_id].windows
        assert windows is not None, "no windows"
        return windows.groups[group].pool.free_ids()

    def free_slots(self, lane_id: LaneId = LANE) -> tuple[int, ...]:
        """Ids of the free slots in the order in which they will be given out."""
        return self.scheduler.lanes[lane_id].slots.free_ids()

    def counters(self, key: int) -> tuple[int, int, int, int]:
        """(H, S, P, U) of a request's current stay."""
        stay = self.sequence(key).stay
        assert stay is not None, "no stay"
        return (
            len(stay.sequence.history),
            stay.num_dispatched,
            stay.num_settled,
            stay.num_placeholders,
        )
