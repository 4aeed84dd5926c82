"""What one turn of the loop does at once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from stepahead.scheduler.core import LaneConfig, LaneId
from stepahead.scheduler.engine import Engine
from stepahead.scheduler.settings import Settings
from stepahead.scheduler.worker_link import WorkerLink
from stepahead.v1 import generation_pb2, worker_pb2
from tests.scheduler.requests import live_request

NUM_REQUESTS = 20


class Link:
    """A worker's link that keeps what it is given to send."""

    lane_id = LaneId(0)
    address = "worker"

    def __init__(self) -> None:
        self.plans: list[worker_pb2.StepPlan] = []

    def send_plan(self, plan: worker_pb2.StepPlan, *, work_waited: bool) -> None:
        self.plans.append(plan)


def engine_with_lane() -> tuple[Engine, Link]:
    engine = Engine(Settings(listen="", workers=(), overlap_depth=1), asyncio.get_running_loop())
    link = Link()
    config = LaneConfig(
        num_slots=64,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_model_len=16,
        num_blocks=128,
        block_size=4,
    )
    engine.open_lane(cast(WorkerLink, link), config, 1)
    return engine, link


async def submit(engine: Engine, prompt: list[int]) -> None:
    live = await live_request(generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIdsInput(ids=prompt)))
    live.choices[0].key = engine.mint_key()
    engine.submit(live)


async def test_prompts_of_one_turn_of_the_loop_are_planned_in_one_step() -> None:
    engine, link = engine_with_lane()
    for index in range(NUM_REQUESTS):
        await submit(engine, [index % 5, 1, 2])
    assert link.plans == [], "the first of them does not go alone"
    await asyncio.sleep(0)
    assert len(link.plans[0].admissions) == NUM_REQUESTS
    await submit(engine, [1])
    await asyncio.sleep(0)
    assert len(engine.core.waiting) == 0, (
        "admitted although the lane takes no plan: less to do at its next boundary"
    )
    engine.close()


async def test_a_fault_in_a_planning_pass_ends_the_process(monkeypatch: Any) -> None:
    """O5: an exception of a loop callback would only be logged."""
    engine, _ = engine_with_lane()
    faults: list[Exception] = []
    engine.on_fatal = faults.append
    error = RuntimeError("broken")

    def fail(_lane_id: LaneId) -> None:
        raise error

    monkeypatch.setattr(engine.core, "plan", fail)
    await submit(engine, [1])
    await asyncio.sleep(0)
    assert faults == [error]
    engine.close()
