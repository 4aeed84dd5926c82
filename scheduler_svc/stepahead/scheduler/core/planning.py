"""The next step of one lane.

Decode rows come first (each is one token, and everybody waits for the slowest stream), then prompt chunks in
order of admission share what is left of the token budget. Memory is settled before any row is placed, so a
victim never has to be taken out of a plan under construction (rule G5).
"""

from __future__ import annotations

from stepahead.scheduler.core.config import SchedulerConfig
from stepahead.scheduler.core.decode_rows import DecodeRows
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.plan import Admission, SettleMode, StepPlan
from stepahead.scheduler.core.sequence import Stay
from stepahead.scheduler.core.step_in_flight import StepInFlight


def is_window_open(lane: Lane, config: SchedulerConfig) -> bool:
    """Whether the lane may get another step now (rule B3)."""
    return len(lane.in_flight) <= config.overlap_depth and not (lane.doomed and lane.in_flight)


def build_plan(lane: Lane, config: SchedulerConfig, sitting_out: dict[Stay, None]) -> StepPlan | None:
    """Plans and books the lane's next step; None if no row can run.

    Assumes nothing about tokens in flight but their number (rule B8).

    Args:
        lane: with an open window.
        config: of the scheduler.
        sitting_out: members of the decode set that `make_room` found no block for.
    """
    _make_way_for_returning_rows(lane, sitting_out)
    members = lane.rows
    if sitting_out:
        members = DecodeRows(stay for stay in lane.decoding if stay not in sitting_out)
    explicit_rows = _choose_chunks(
        lane,
        budget=lane.config.max_num_batched_tokens - len(members),
        max_rows=lane.config.max_num_seqs - len(members),
        max_described=config.max_described_tokens,
    )
    if not members and not explicit_rows:
        return None
    return _dispatch(lane, config, StepInFlight(lane.next_step_id, explicit_rows, members), sitting_out)


def _make_way_for_returning_rows(lane: Lane, sitting_out: dict[Stay, None]) -> None:
    """A last output that came back empty has lost its place to a newcomer: the youngest sit out a step for it."""
    if not lane.prefilling and len(lane.decoding) <= lane.config.max_num_seqs:
        return
    num_returning = sum(stay.rewinding and not stay.num_in_flight for stay in lane.prefilling)
    surplus = len(lane.decoding) - len(sitting_out) + num_returning - lane.config.max_num_seqs
    if surplus > 0:
        running = [stay for stay in lane.decoding if stay not in sitting_out]
        running.sort(key=lambda stay: stay.sequence.rank)
        sitting_out.update(dict.fromkeys(running[-surplus:]))


def make_room(lane: Lane) -> tuple[dict[Stay, None], list[Stay]]:
    """Extends the block tables of decode rows that cross into a new block, oldest request first.

    If no block is free: a row waits one step for blocks that are coming back anyway (rule E7), at most as many
    rows as such blocks; only then does the youngest running stay lose its place, possibly the asking one.
    Older requests therefore always make progress, and a lone one always fits (checked at acceptance).

    Returns:
        The rows that sit out, and the stays that were retired (the caller preempts their sequences).
    """
    waiting: dict[Stay, None] = {}
    victims: list[Stay] = []
    if not lane.crossing:
        return waiting, victims
    crossing, lane.crossing = lane.crossing, []
    if lane.extend(crossing):
        return waiting, victims
    if lane.windows:
        lane.windows.settle([*lane.decoding, *lane.prefilling])
    crossing.sort(key=lambda stay: stay.sequence.rank)
    for stay in crossing:
        while not stay.retired:
            if lane.extend([stay]):
                break
            if len(waiting) < lane.num_returning_blocks:
                waiting[stay] = None
                break
            victim = choose_victim(lane)
            lane.retire(victim)
            victims.append(victim)
    for victim in victims:
        waiting.pop(victim, None)
    lane.crossing = list(waiting)
    return waiting, victims


def choose_victim(lane: Lane) -> Stay:
    """The youngest running stay of the lowest priority: the oldest of the highest is never starved (rule G6).

    A waiting request never displaces a running one, whatever its priority; memory alone costs a place.
    """
    running = [*lane.decoding, *lane.prefilling]
    return max(running, key=lambda stay: stay.sequence.rank)


def _choose_chunks(lane: Lane, *, budget: int, max_rows: int, max_described: int) -> list[tuple[Stay, int, bool]]:
    """Explicit rows: (stay, positions to feed, whether the last one is the newest known token).

    A chunk is cut to what the stay's window tables can be made to hold: at least a position with nothing in flight.
    A replay ends with a row.
    """
    rows: list[tuple[Stay, int, bool]] = []
    for stay in lane.prefilling:
        if budget <= 0 or len(rows) >= max_rows:
            break
        if stay.rewinding and stay.num_in_flight:
            continue  # rows in flight are holes; their results must come back first
        to_feed = stay.num_to_feed
        count = min(to_feed, budget)
        if stay.num_to_replay:
            count = min(count, stay.num_to_replay)
        if stay.is_described:
            count = min(count, max_described)
        if lane.windows and count:
            # A member that waits for a block goes first: nobody reserves more meanwhile.
            count = lane.windows.fit(stay, count, may_reserve=not lane.crossing)
            lane.grow_windows(stay, stay.num_dispatched + count)
        if not count:
            continue
        if stay.is_described:
            max_described -= count
        rows.append((stay, count, count == to_feed))
        budget -= count
    if lane.windows:
        lane.room_version += lane.windows.take_given_back()
    return rows


def _dispatch(lane: Lane, config: SchedulerConfig, step: StepInFlight, sitting_out: dict[Stay, None]) -> StepPlan:
    """Builds the wire-shaped delta and moves S, U and the fences (rule A3: S moves only here)."""
    newcomers = [stay for stay, _, _ in step.explicit_rows if not stay.announced]
    forks = [stay for stay in newcomers if stay.copy_from is not None]
    step.borrowed = [stay.copy_from for stay in forks if stay.copy_from is not None]
    in_place = config.overlap_depth == 0 or (config.settle_prompts_in_place and bool(step.explicit_rows))
    rows = step.explicit_rows
    plan = StepPlan(
        step_id=step.step_id,
        committed_through=lane.committed_through,
        settle=SettleMode.COMPLETE_IN_PLACE if in_place else SettleMode.RETAIN,
        released_slots=tuple(stay.slot for stay in lane.released),
        released_incarnations=tuple(stay.incarnation for stay in lane.released),
        append_slots=tuple(lane.new_block_slots),
        append_block_ids=tuple(lane.new_blocks),
        append_groups=tuple(lane.new_block_groups) if any(lane.new_block_groups) else (),
        copy_src_block_ids=tuple(step.borrowed),
        copy_dst_block_ids=tuple(stay.block_ids[stay.num_cached_blocks] for stay in forks),
        admissions=tuple(_admission(stay) for stay in newcomers),
        joined_slots=tuple(stay.slot for stay in lane.joined),
        sit_out_slots=tuple(stay.slot for stay in sitting_out),
        left_slots=tuple(lane.left_slots),
        row_slots=tuple(stay.slot for stay, _, _ in rows),
        row_starts=tuple(stay.num_dispatched for stay, _, _ in rows),
        row_counts=tuple(count for _, count, _ in rows),
        row_samples=tuple(samples for _, _, samples in rows),
        total_tokens=step.num_tokens,
        total_rows=len(step.incarnations),
    )
    step.constrained = _constrained_rows(step)
    lane.dispatch(plan, step)
    _advance(lane, step, sitting_out)
    return plan


def _constrained_rows(step: StepInFlight) -> list[tuple[Stay, int]]:
    """Called before the step's rows advance."""
    rows = [
        (stay, stay.num_dispatched + count - 1)
        for stay, count, samples in step.explicit_rows
        if samples and stay.sequence.request.constrained
    ]
    return rows + [(stay, stay.num_dispatched) for stay in step.members.constrained]


def _advance(lane: Lane, step: StepInFlight, sitting_out: dict[Stay, None]) -> None:
    if step.members:
        for stay in sitting_out:
            lane.sit_out(stay)
        lane.tick(step)
    for stay, count, samples in step.explicit_rows:
        stay.num_dispatched += count
        stay.last_step = step.step_id
        stay.announced = True
        stay.copy_from = None
        stay.rewinding = False
        if samples:
            stay.num_placeholders += 1
            lane.settle_into_decode(stay)


def _admission(stay: Stay) -> Admission:
    sequence = stay.sequence
    tables = [stay.block_ids] if stay.block_ids else []
    tables += [table.block_ids for table in stay.windows]
    null_counts = [0] * (len(tables) - len(stay.windows)) + [table.num_null for table in stay.windows]
    return Admission(
        slot=stay.slot,
        incarnation=stay.incarnation,
        token_ids=tuple(sequence.history),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_settled_tokens=stay.num_settled if stay.replay is None else stay.replay.end,
        replay_start=None if stay.replay is None else stay.replay.start,
        block_ids=tuple(block_id for table in tables for block_id in table),
        block_counts=tuple(len(table) for table in tables) if len(tables) > 1 else (),
        null_counts=tuple(null_counts) if any(null_counts) else (),
        sampling=sequence.request.sampling,
        min_tokens=sequence.request.min_tokens,
        constrained=sequence.request.constrained,
    )
