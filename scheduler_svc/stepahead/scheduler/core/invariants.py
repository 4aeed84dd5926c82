"""The rules that must hold between any two calls, as code. Tests call this after every event.

It reads everything and changes nothing; it costs O(everything), so production does not call it.
"""

from __future__ import annotations

from collections import Counter

from stepahead.scheduler.core.block_pool import BlockPool
from stepahead.scheduler.core.config import Ordering
from stepahead.scheduler.core.ids import BlockId
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.request import RequestStatus
from stepahead.scheduler.core.scheduler import Scheduler
from stepahead.scheduler.core.sequence import Sequence, Stay
from stepahead.scheduler.core.window_groups import WindowGroup
from stepahead.scheduler.core.window_table import WindowTable


class InvariantViolation(AssertionError):
    """A rule of the core does not hold. The message starts with the rule's id."""


def _require(condition: bool, rule: str, message: str) -> None:  # noqa: FBT001 - reads like assert
    if not condition:
        raise InvariantViolation(f"{rule}: {message}")


def check_invariants(scheduler: Scheduler) -> None:
    """Raises InvariantViolation if a rule does not hold."""
    _check_queue(scheduler)
    for lane in scheduler.lanes.values():
        _check_pools(lane)
        _check_steps(scheduler, lane)
        for stay in _live_stays(lane):
            _check_counters(lane, stay)
        for stay in lane.decoding:
            _check_bookings(lane, stay)
    _check_quiescence(scheduler)


def _live_stays(lane: Lane) -> list[Stay]:
    return [*lane.prefilling, *lane.decoding, *lane.finishing]


def _check_queue(scheduler: Scheduler) -> None:
    waiting = list(scheduler.waiting)
    _require(len(waiting) == len(set(waiting)), "F1", "a sequence waits twice")
    for sequence in waiting:
        _require(
            sequence.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED),
            "F4",
            f"a {sequence.status} sequence is in the queue",
        )
        _require(scheduler.sequences.get(sequence.request.key) is sequence, "A8", "an unknown sequence waits")
    if scheduler.config.ordering is Ordering.FCFS:
        preempted = [s.arrival for s in waiting if s.status is RequestStatus.PREEMPTED]
        _require(preempted == sorted(preempted), "G6", "preempted sequences lost their order")
    running: set[Sequence] = {stay.sequence for lane in scheduler.lanes.values() for stay in _live_stays(lane)}
    _require(
        len(waiting) + len(running) == len(scheduler.sequences),
        "A8",
        "a live sequence neither waits nor runs",
    )


def _check_pools(lane: Lane) -> None:
    live = _live_stays(lane)
    fenced = [stay for step in lane.in_flight for stay in step.fenced]
    _require(len(set(live)) == len(live), "E4", "a stay is in two row lists")
    _require(len(live) == lane.slots.num_owned, "E4", "live stays and owned slots differ")
    _require(len(fenced) == lane.slots.num_quarantined, "E4", "fenced stays and quarantined slots differ")
    slots = Counter[int]([*lane.slots.free_ids(), *(stay.slot for stay in [*live, *fenced])])
    _require(
        len(slots) == lane.slots.num_total and max(slots.values()) == 1, "E4", "a slot is lost or in two places"
    )
    _check_blocks(lane, live, fenced)


def _check_blocks(lane: Lane, live: list[Stay], fenced: list[Stay]) -> None:
    borrowed = [block_id for step in lane.in_flight for block_id in step.borrowed]
    borrowed += [stay.copy_from for stay in live if stay.copy_from is not None]
    tables = [stay.block_ids for stay in live]
    _check_pool(lane.blocks, [*tables, borrowed], [stay.block_ids for stay in fenced])
    for stay in live:
        _check_private(stay.block_ids[stay.num_published_blocks :], tables)
        _require(
            max(stay.num_settled, stay.replay.end if stay.replay else 0) // lane.config.block_size
            >= stay.num_published_blocks
            or stay.num_published_blocks >= stay.num_blocks,
            "H1",
            "a block with unsettled positions has a key",
        )
        _check_unpublished(stay, lane.blocks, stay.block_ids[stay.num_cached_blocks :])
    for index, group in enumerate(lane.windows.groups if lane.windows else ()):
        _check_window_group(group, {stay: stay.windows[index] for stay in live}, [s.windows[index] for s in fenced])
        whole = all(stay.windows[index].end == stay.num_blocks for stay in lane.decoding)
        _require(whole, "A6", "a member's block tables differ in length")


def _check_pool(pool: BlockPool, held: list[list[BlockId]], retired: list[list[BlockId]]) -> None:
    """Every block is where its pool believes it is, and nowhere else."""
    free, idle = pool.free_ids(), pool.idle_ids()
    owners = Counter[int](block_id for table in held for block_id in table)
    behind = Counter[int](block_id for table in retired for block_id in table)
    resting = Counter[int]([*free, *idle])
    _require(not resting or max(resting.values()) == 1, "E4", "a block rests in two places")
    for block_id in range(pool.num_total):
        booked = pool.state_of(BlockId(block_id))
        actual = (owners[block_id], behind[block_id])
        _require(booked == actual, "E4", f"block {block_id} has {actual} owners, {booked} are booked")
        _require((block_id in resting) == (actual == (0, 0)), "E4", f"block {block_id} is lost or in two places")
    quarantined = sum(block_id not in owners for block_id in behind)
    _require(len(owners) == pool.num_owned, "E4", f"{len(owners)} owned, {pool.num_owned} booked")
    _require(quarantined == pool.num_quarantined, "E4", f"{quarantined} quarantined, {pool.num_quarantined} booked")
    _require(
        len(free) + len(idle) + pool.num_owned + pool.num_quarantined == pool.num_total,
        "E4",
        "the states of the blocks do not sum to the pool",
    )


def _check_private(private: list[BlockId], tables: list[list[BlockId]]) -> None:
    writers = Counter[int](block_id for table in tables for block_id in table)
    _require(all(writers[block_id] == 1 for block_id in private), "H5", "a block that is written has two owners")


def _check_unpublished(stay: Stay, pool: BlockPool, written: list[BlockId]) -> None:
    known = not stay.may_publish and any(pool.is_known(block_id) for block_id in written)
    _require(not known, "N9", "a block that was computed from approximate states has a key")


def _check_window_group(group: WindowGroup, live: dict[Stay, WindowTable], fenced: list[WindowTable]) -> None:
    tables = [table.block_ids for table in live.values()]
    _check_pool(group.pool, tables, [table.block_ids for table in fenced])
    promised = sum(table.num_reserved for table in [*live.values(), *fenced])
    _require(promised == group.num_reserved, "N11", f"{promised} blocks reserved, {group.num_reserved} booked")
    _require(promised <= group.pool.num_total, "N11", "more blocks are reserved than there are")
    for stay, table in live.items():
        held, settled = len(table.block_ids), stay.num_settled
        _check_private(table.block_ids[max(0, stay.num_published_blocks - table.num_null) :], tables)
        _require(held <= table.num_reserved, "N11", f"holds {held} blocks, {table.num_reserved} are reserved")
        _require(
            table.num_null * group.block_size
            <= max(0, settled - group.window + 1, stay.replay.start if stay.replay else 0),
            "N1",
            f"{table.num_null} blocks dropped with P={settled} and a window of {group.window}",
        )
        _check_unpublished(stay, group.pool, table.block_ids)
        _require(stay.num_dispatched <= table.end * group.block_size, "A6", "fed past a window's block table")
        _require(table.end <= stay.num_blocks, "A6", "a window's block table is longer than the others")


def _check_steps(scheduler: Scheduler, lane: Lane) -> None:
    window = scheduler.config.overlap_depth + 1
    _require(len(lane.in_flight) <= window, "B3", f"{len(lane.in_flight)} steps in flight")
    for offset, step in enumerate(lane.in_flight):
        _require(step.step_id == lane.committed_through + 1 + offset, "B1", "step ids are not dense")
        _require(step.num_tokens <= lane.config.max_num_batched_tokens, "M3", "token budget exceeded")
        _require(len(step.incarnations) <= lane.config.max_num_seqs, "M3", "more rows than max_num_seqs")
        for stay in step.fenced:
            _require(stay.last_step == step.step_id, "E1", "a fence is not the stay's last step")
    held = {*_live_stays(lane), *(stay for step in lane.in_flight for stay in step.fenced)}
    for step in lane.in_flight:
        for stay in [*(stay for stay, _, _ in step.explicit_rows), *step.decode_rows]:
            _require(stay in held, "E1", f"step {step.step_id} names a stay whose slot is free")
    for stay in _live_stays(lane):
        _require(stay.last_step < lane.next_step_id, "E1", "a fence names a step not dispatched")


def _check_counters(lane: Lane, stay: Stay) -> None:
    # Not `history`: a look would empty the backlog, and no test would ever see one.
    history = stay.sequence.unflushed_history
    num_history = len(history) + lane.clock.backlog.num_missing(history)
    num_outputs = num_history - stay.sequence.num_prompt_tokens
    dispatched, settled, unknown = stay.num_dispatched, stay.num_settled, stay.num_placeholders
    in_flight = 0
    placeholders = 0
    for step in lane.in_flight:
        for other, count, samples in step.explicit_rows:
            if other is stay:
                in_flight += count
                placeholders += samples
        if stay in step.decode_rows:
            in_flight += 1
            placeholders += 1
    where = f"H={num_history} S={dispatched} P={settled} U={unknown}"
    _require(min(settled, in_flight, unknown) >= 0, "A2", f"a counter is negative: {where}")
    if not stay.rewinding:  # holes in flight were rolled back only in part
        _require(dispatched == settled + in_flight, "A2", f"S != P + F: {where} F={in_flight}")
        _require(unknown == placeholders, "A2", f"U != placeholders in flight: {where}")
    if stay in lane.prefilling and not stay.rewinding:
        _require(unknown == 0 and dispatched < num_history, "A2", f"prefill: {where}")
    elif not stay.rewinding:
        _require(dispatched == num_history + unknown - 1, "A2", f"S != H + U - 1: {where}")
    if num_outputs and not in_flight and stay not in lane.prefilling:
        _require(num_history == settled + 1, "A1", f"H != P + 1: {where}")
    if stay.replay is not None:
        _require(stay.replay.start <= settled and stay.replay.end < num_history, "N5", f"{stay.replay}: {where}")
    _require(dispatched < stay.sequence.max_total_tokens, "D2", f"fed the last possible output: {where}")
    _require(dispatched <= stay.capacity, "A6", f"fed past the block table: {where}")
    _require(num_history <= stay.sequence.max_total_tokens, "D2", f"history too long: {where}")


def _check_bookings(lane: Lane, stay: Stay) -> None:
    """A member is looked at exactly when its stride ends, and never at another time."""
    tick, position = lane.clock.dispatched, stay.num_dispatched
    _require(
        stay in lane.ends.get(stay.end_tick, ()) and stay.end_tick - tick == stay.feed_limit - position,
        "D2",
        f"booked to end after tick {stay.end_tick}, at {position} in tick {tick}",
    )
    if stay in lane.crossing:
        _require(position == stay.capacity, "A6", f"asks for a block at {position} of {stay.capacity}")
        return
    _require(
        stay in lane.borders.get(stay.border_tick, ()) and stay.border_tick - tick == stay.capacity - position,
        "A6",
        f"booked to need a block after tick {stay.border_tick}, at {position} in tick {tick}",
    )


def _check_quiescence(scheduler: Scheduler) -> None:
    if not scheduler.is_idle:
        return
    for lane in scheduler.lanes.values():
        groups = lane.windows.groups if lane.windows else []
        _require(not any(group.num_reserved for group in groups), "E6", "blocks are reserved while idle")
        for pool in (*lane.block_pools, lane.slots):
            _require(pool.num_owned == 0 and pool.num_quarantined == 0, "E6", "resources held while idle")
