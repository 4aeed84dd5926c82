"""Deliberate breakages of the core, one at a time, and what catches each: the tests of the tests.

Each mutation patches one function of the core (or of the fake worker) the way a plausible mistake would, keeping
the books consistent where it can, so that not the bookkeeping but the rule itself has to notice.
"""

# pyright: reportPrivateUsage=false
# A mutation replaces private functions; that is its purpose.

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from stepahead.scheduler.core import committing, planning
from stepahead.scheduler.core import scheduler as scheduler_module
from stepahead.scheduler.core.block_pool import FencedPool
from stepahead.scheduler.core.config import LaneConfig, SchedulerConfig
from stepahead.scheduler.core.events import CommitOutcome, Finished, Preempted
from stepahead.scheduler.core.ids import Incarnation, LaneId, RequestKey, SlotId
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.plan import Admission, RowFault, StepResult
from stepahead.scheduler.core.request import FinishReason, RequestStatus
from stepahead.scheduler.core.scheduler import Scheduler
from stepahead.scheduler.core.sequence import Sequence, Stay
from stepahead.scheduler.core.step_in_flight import StepInFlight
from stepahead.scheduler.core.waiting_queue import Line, WaitingQueue
from tests.scheduler.core import (
    test_ends,
    test_failures,
    test_fork,
    test_preemption,
    test_prefill_and_decode,
    test_windows,
)
from tests.simulation import cache_mutations, fake_worker, gate_mutations, replay_mutations, window_mutations, world
from tests.simulation.tagged_model import mix, next_token
from tests.simulation.world import World

MAX_SEEDS = 100
MAX_EVENTS = 4000
"""A clean world needs a few hundred."""


@dataclass(frozen=True)
class Mutation:
    """One breakage."""

    name: str
    """The rule it breaks, and how."""
    apply: Callable[[pytest.MonkeyPatch], None]
    caught_by: frozenset[str]
    """Rules (or exception types) that may notice it first."""
    probe: Callable[[], None] | None = None
    """A unit test, where the simulation's outcome cannot tell right from wrong."""


def hunt(mutation: Mutation) -> tuple[str, int] | None:
    """Runs the probe, or worlds from seed 0 on, until something fails: (rule, seed). None: nothing noticed."""
    if mutation.probe is not None:
        try:
            mutation.probe()
        except AssertionError:
            return mutation.probe.__name__, 0
        return None
    for seed in range(MAX_SEEDS):
        try:
            World(seed).run(max_events=MAX_EVENTS)
        except Exception as error:
            rule, colon, _ = str(error).partition(":")
            is_rule = colon and isinstance(error, AssertionError) and len(rule) <= 3
            return (rule if is_rule else type(error).__name__), seed
    return None


def mutation_table() -> list[tuple[str, str, int]]:
    """(mutation, what caught it, the first seed that did) for every mutation; "nothing" and -1 if it survived."""
    table: list[tuple[str, str, int]] = []
    for mutation in MUTATIONS:
        with pytest.MonkeyPatch.context() as patch:
            mutation.apply(patch)
            rule, seed = hunt(mutation) or ("nothing", -1)
        table.append((mutation.name, rule, seed))
    return table


# ------------------------------------------------------------------------------------------------ fences


def _release_blocks_at_retirement(patch: pytest.MonkeyPatch) -> None:
    retire = Lane.retire

    def mutant(lane: Lane, stay: Stay) -> None:
        retire(lane, stay)
        if stay.last_step > lane.committed_through:
            lane.blocks.release(stay.block_ids)
            stay.block_ids = []

    patch.setattr(Lane, "retire", mutant)


def _fence_one_step_early(patch: pytest.MonkeyPatch) -> None:
    retire = Lane.retire

    def mutant(lane: Lane, stay: Stay) -> None:
        if lane.in_flight and stay.last_step > lane.in_flight[0].step_id:
            stay.last_step = lane.in_flight[0].step_id
        retire(lane, stay)

    patch.setattr(Lane, "retire", mutant)


def _check_nothing(scheduler: Scheduler) -> None:
    """Stands for the invariant checker, so that the worker or the oracle has to notice."""


def _release_slots_at_retirement(patch: pytest.MonkeyPatch) -> None:
    retire, close = Lane.retire, Lane.close
    early: set[Incarnation] = set()

    def mutant(lane: Lane, stay: Stay) -> None:
        retire(lane, stay)
        if stay.last_step > lane.committed_through:
            early.add(stay.incarnation)
            lane.slots.release([stay.slot])

    def close_blocks_only(lane: Lane, stay: Stay) -> None:
        if stay.incarnation in early:
            lane.slots.num_owned += 1
            lane.slots.quarantine(1)
            free = lane.slots.free_ids()
            close(lane, stay)
            lane.slots._free.clear()
            lane.slots._free.extend(free)
        else:
            close(lane, stay)

    patch.setattr(Lane, "retire", mutant)
    patch.setattr(Lane, "close", close_blocks_only)
    # The checker sees it at once (E4); without it the worker must.
    patch.setattr(world, "check_invariants", _check_nothing)


def _lose_a_block_at_close(patch: pytest.MonkeyPatch) -> None:
    close = Lane.close

    def mutant(lane: Lane, stay: Stay) -> None:
        del stay.block_ids[1:2]
        close(lane, stay)

    patch.setattr(Lane, "close", mutant)


def _forget_the_release(patch: pytest.MonkeyPatch) -> None:
    retire = Lane.retire

    def mutant(lane: Lane, stay: Stay) -> None:
        retire(lane, stay)
        lane.released.clear()

    patch.setattr(Lane, "retire", mutant)


def _never_wait_for_returning_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "num_returning_blocks", 0)


def _wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "num_returning_blocks", 10**6)


class _OptimisticPool(FencedPool[SlotId]):
    """Counts retiring slots as free."""

    __slots__ = ()

    @property
    def num_free(self) -> int:  # pyright: ignore[reportImplicitOverride] - a mutant
        return self.num_total - self.num_owned


def _retiring_slots_count_as_free(patch: pytest.MonkeyPatch) -> None:
    build = Lane.__init__

    def mutant(lane: Lane, lane_id: LaneId, config: LaneConfig, epoch: int, **fields: str | None) -> None:
        build(lane, lane_id, config, epoch, **fields)
        lane.slots = _OptimisticPool(SlotId(i) for i in range(config.num_slots))

    patch.setattr(Lane, "__init__", mutant)


# ------------------------------------------------------------------------------------------------ preemption


def _resume_from_the_prompt(patch: pytest.MonkeyPatch) -> None:
    admission = planning._admission

    def mutant(stay: Stay) -> Admission:
        good = admission(stay)
        return replace(good, token_ids=good.token_ids[: good.num_prompt_tokens])

    patch.setattr(planning, "_admission", mutant)


def _resume_before_the_token_in_flight(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def mutant(scheduler: Scheduler, sequence: Sequence) -> Preempted:
        event = preempt(scheduler, sequence)
        sequence.stay = None
        return event

    patch.setattr(Scheduler, "_preempt", mutant)


def _drop_frames(patch: pytest.MonkeyPatch, *, only_the_oldest: bool) -> None:
    """Treats a preempted sequence's row as overrun: for every frame in flight, or for one frame only (G2)."""
    commit = committing.commit_step
    dropped: set[Incarnation] = set()

    def mutant(lane: Lane, result: StepResult, finish: Callable[[Sequence, Finished], None]) -> CommitOutcome:
        hidden: list[Sequence] = []
        step = lane.in_flight[0] if lane.in_flight else None
        for stay in [*(row[0] for row in step.explicit_rows), *step.decode_rows] if step is not None else []:
            sequence = stay.sequence
            first = not only_the_oldest or stay.incarnation not in dropped
            if sequence.status is RequestStatus.PREEMPTED and first:
                dropped.add(stay.incarnation)
                sequence.status = RequestStatus.FINISHED
                hidden.append(sequence)
        outcome = commit(lane, result, finish)
        for sequence in hidden:
            sequence.status = RequestStatus.PREEMPTED
        return outcome

    patch.setattr(scheduler_module, "commit_step", mutant)


def _leave_the_victim_in_the_plan(patch: pytest.MonkeyPatch) -> None:
    make_room = planning.make_room

    def mutant(lane: Lane) -> tuple[dict[Stay, None], list[Stay]]:
        waiting, victims = make_room(lane)
        waiting.update(dict.fromkeys(victims))
        return waiting, victims

    patch.setattr(scheduler_module, "make_room", mutant)


def _lose_the_order_of_the_preempted(patch: pytest.MonkeyPatch) -> None:
    push = Line.push

    def mutant(line: Line, sequence: Sequence) -> None:
        if sequence.status is RequestStatus.PREEMPTED:
            line._preempted.append(sequence)
        else:
            push(line, sequence)

    patch.setattr(Line, "push", mutant)


# ------------------------------------------------------------------------------------------------ ends


def _feed_the_last_output(patch: pytest.MonkeyPatch) -> None:
    build = Stay.__init__

    def mutant(stay: Stay, sequence: Sequence, **fields: object) -> None:
        build(stay, sequence, **fields)  # type: ignore[arg-type]
        stay.feed_limit += 1

    patch.setattr(Stay, "__init__", mutant)


def _sampled_rows(step: StepInFlight, result: StepResult) -> list[tuple[Stay, int]]:
    """The rows of a step that got a token, with it."""
    stays = [stay for stay, _, _ in step.explicit_rows] + step.decode_rows
    counts = result.token_counts or [1] * len(stays)
    return list(
        zip((stay for stay, count in zip(stays, counts, strict=True) if count), result.token_ids, strict=True)
    )


def _deliver_overrun(patch: pytest.MonkeyPatch, *, only_aborted: bool) -> None:
    """Exposes the token of a row whose request has ended: by any end, or by an abort only (F2)."""
    commit, abort = committing.commit_step, Scheduler.abort
    aborted: set[RequestKey] = set()

    def mutant_abort(scheduler: Scheduler, key: RequestKey, reason: FinishReason = FinishReason.CANCELLED):
        aborted.add(key)
        return abort(scheduler, key, reason)

    def mutant(lane: Lane, result: StepResult, finish: committing.Finish) -> CommitOutcome:
        rows = _sampled_rows(lane.in_flight[0], result) if lane.in_flight else []
        ended = [stay.sequence.status is RequestStatus.FINISHED for stay, _ in rows]
        outcome = commit(lane, result, finish)
        for (stay, token), over in zip(rows, ended, strict=True):
            key = stay.sequence.request.key
            if over and (key in aborted or not only_aborted):
                outcome.keys = [*outcome.keys, key]
                outcome.token_ids = [*outcome.token_ids, token]
        return outcome

    patch.setattr(Scheduler, "abort", mutant_abort)
    patch.setattr(scheduler_module, "commit_step", mutant)


def _check_end(patch: pytest.MonkeyPatch, *, length_first: bool, min_tokens_slack: int) -> None:
    def mutant(sequence: Sequence, token: int, outcome: CommitOutcome, finish: committing.Finish) -> None:
        request, num_outputs = sequence.request, sequence.num_output_tokens
        stops = token in request.stop_token_ids and num_outputs > request.min_tokens - min_tokens_slack
        full = len(sequence.history) >= sequence.max_total_tokens
        if not stops and not full:
            return
        reason = FinishReason.LENGTH if full and (length_first or not stops) else FinishReason.STOP
        finished = Finished(request.key, reason, num_outputs)
        finish(sequence, finished)
        outcome.finished.append(finished)

    patch.setattr(committing, "_check_end", mutant)


def _leave_the_aborted_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    def mutant(queue: WaitingQueue, sequence: Sequence) -> None:
        if sequence.status is not RequestStatus.FINISHED:
            remove(queue, sequence)

    remove = WaitingQueue.remove
    patch.setattr(WaitingQueue, "remove", mutant)


def _read_histories_without_their_backlog(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "history", Sequence.unflushed_history)


# ------------------------------------------------------------------------------------------------ rows and steps

Rows = list[tuple[Stay, int, bool]]


def _every_chunk_samples(patch: pytest.MonkeyPatch) -> None:
    choose = planning._choose_chunks

    def mutant(lane: Lane, **limits: int) -> Rows:
        return [(stay, count, True) for stay, count, _ in choose(lane, **limits)]

    patch.setattr(planning, "_choose_chunks", mutant)


def _budget_one_too_large(patch: pytest.MonkeyPatch) -> None:
    choose = planning._choose_chunks

    def mutant(lane: Lane, *, budget: int, **limits: int) -> Rows:
        return choose(lane, budget=budget + 1, **limits)

    patch.setattr(planning, "_choose_chunks", mutant)


def _feed_a_position_twice(patch: pytest.MonkeyPatch) -> None:
    advance = planning._advance

    def mutant(lane: Lane, step: StepInFlight, sitting_out: dict[Stay, None]) -> None:
        advance(lane, step, sitting_out)
        # The cursor lags, and so do the books that the checker compares it with.
        for index, (stay, count, samples) in enumerate(step.explicit_rows):
            if count > 1 and not samples:
                stay.num_dispatched -= 1
                step.explicit_rows[index] = (stay, count - 1, samples)

    patch.setattr(planning, "_advance", mutant)


def _window_one_too_wide(patch: pytest.MonkeyPatch) -> None:
    is_open = planning.is_window_open

    def mutant(lane: Lane, config: SchedulerConfig) -> bool:
        return is_open(lane, replace(config, overlap_depth=config.overlap_depth + 1))

    patch.setattr(scheduler_module, "is_window_open", mutant)
    enabled = World._enabled

    def eager(this: World) -> object:
        this.depth += 1
        try:
            return enabled(this)
        finally:
            this.depth -= 1

    patch.setattr(World, "_enabled", eager)


def _plan_behind_doomed_steps(patch: pytest.MonkeyPatch) -> None:
    def mutant(lane: Lane, config: SchedulerConfig) -> bool:
        return len(lane.in_flight) <= config.overlap_depth

    patch.setattr(scheduler_module, "is_window_open", mutant)


def _accept_results_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    commit = Scheduler.commit

    def mutant(scheduler: Scheduler, lane_id: LaneId, result: StepResult) -> CommitOutcome:
        return commit(scheduler, lane_id, replace(result, epoch=scheduler.lanes[lane_id].epoch))

    patch.setattr(Scheduler, "commit", mutant)


def _keep_placeholders_of_failed_steps(patch: pytest.MonkeyPatch) -> None:
    fail = committing.fail_step

    def mutant(lane: Lane, step_id: int) -> None:
        step = lane.in_flight[0]
        sampling = [stay for stay, _, samples in step.explicit_rows if samples] + step.decode_rows
        fail(lane, step_id)  # type: ignore[arg-type]
        for stay in sampling:
            stay.num_placeholders += 1

    patch.setattr(scheduler_module, "fail_step", mutant)


def _feed_again_before_the_holes_are_back(patch: pytest.MonkeyPatch) -> None:
    rewind = Lane.rewind

    def mutant(lane: Lane, stay: Stay) -> None:
        rewind(lane, stay)
        stay.rewinding = stay.retired

    patch.setattr(Lane, "rewind", mutant)


def _row_faults_are_retried(patch: pytest.MonkeyPatch) -> None:
    commit = committing.commit_step

    def mutant(lane: Lane, result: StepResult, finish: committing.Finish) -> CommitOutcome:
        return commit(lane, replace(result, faults={}), finish)

    patch.setattr(scheduler_module, "commit_step", mutant)


def _draws_depend_on_the_step(patch: pytest.MonkeyPatch) -> None:
    draws = itertools.count()

    def mutant(context: int, **fields: object) -> int | None:
        return next_token(mix(context, next(draws)), **fields)  # type: ignore[arg-type]

    patch.setattr(fake_worker, "next_token", mutant)


def probe_row_fault() -> None:
    """The unit test of J10 with one fault."""
    test_failures.test_a_row_fault_ends_that_request_only(RowFault.NON_FINITE)


def probe_predictable_end() -> None:
    """The unit test of D2 with overlap."""
    test_prefill_and_decode.test_predictable_end_costs_no_row(1)


def _rules(*ids: str) -> frozenset[str]:
    return frozenset(ids)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("E1: blocks are free at retirement", _release_blocks_at_retirement, _rules("E1", "E4")),
    Mutation("E1/E3: the fence is the oldest step in flight", _fence_one_step_early, _rules("E1", "E3", "E4")),
    Mutation("E3: slots are free at retirement", _release_slots_at_retirement, _rules("E3", "B6", "O8")),
    Mutation("E4: a block is lost at close", _lose_a_block_at_close, _rules("E4")),
    Mutation("B6: the release is not sent", _forget_the_release, _rules("A6", "B6", "E4", "M3")),
    Mutation(
        "E7: preempt instead of waiting",
        _never_wait_for_returning_blocks,
        _rules("test_sit_out_names_the_waiting_row_and_keeps_the_others_going"),
        test_preemption.test_sit_out_names_the_waiting_row_and_keeps_the_others_going,
    ),
    Mutation(
        "O8: wait for blocks that never return",
        _wait_for_ever,
        _rules("test_repeated_preemption_equals_an_undisturbed_run"),
        # In a world a random abort sooner or later frees whoever waits.
        test_preemption.test_repeated_preemption_equals_an_undisturbed_run,
    ),
    Mutation(
        "O8: planned behind a step that must fail",
        _plan_behind_doomed_steps,
        _rules("test_a_failure_is_not_handed_on_for_ever"),
        test_failures.test_a_failure_is_not_handed_on_for_ever,
    ),
    Mutation("E9: retiring slots count as free", _retiring_slots_count_as_free, _rules("AssertionError")),
    Mutation(
        "H2: unsettled blocks are published",
        cache_mutations.publish_unsettled_blocks,
        _rules("H1", "H2", "H5", "D4"),
    ),
    Mutation("H4: keys forget what came before", cache_mutations.keys_without_their_past, _rules("D4", "H5", "E4")),
    Mutation("H5: a full hit leaves nothing to feed", cache_mutations.hit_the_whole_history, _rules("H5", "A2")),
    Mutation(
        "H6: an evicted block keeps its key",
        cache_mutations.evict_without_forgetting,
        _rules("D4", "H2", "H5", "E4", "E1"),
    ),
    Mutation(
        "E1: a copied block comes back early",
        cache_mutations.return_the_copied_block_at_once,
        _rules("test_a_copied_block_is_kept_until_the_copy_is_made"),
        test_fork.test_a_copied_block_is_kept_until_the_copy_is_made,
    ),
    Mutation(
        "H2: a fork of a fork copies too early",
        cache_mutations.fork_before_the_parent_has_its_tail,
        _rules("test_a_fork_of_a_fork_waits_for_the_copy"),
        test_fork.test_a_fork_of_a_fork_waits_for_the_copy,
    ),
    Mutation("N1: a window is short", window_mutations.drop_a_position_early, _rules("N3", "E1", "E4", "D4")),
    Mutation("N1: S decides", window_mutations.drop_by_what_is_dispatched, _rules("E1", "E4", "H2", "D4")),
    Mutation("N11: too few blocks are charged", window_mutations.charge_a_block_too_few, _rules("N11", "O8", "V3")),
    Mutation("N12: no window at a hit", window_mutations.hit_without_the_window, _rules("D4", "N3", "N11", "H2")),
    *(Mutation(name, apply, _rules(*rules), probe) for name, apply, rules, probe in replay_mutations.TABLE),
    *(Mutation(name, apply, _rules(*rules)) for name, apply, rules in gate_mutations.TABLE),
    Mutation(
        "H3: window blocks of a failed row are shared",
        window_mutations.keep_the_keys_of_poisoned_blocks,
        _rules("test_h3_window_blocks_of_a_failed_row_are_forgotten"),
        test_windows.test_h3_window_blocks_of_a_failed_row_are_forgotten,
    ),
    Mutation(
        "G3: a history is read without its backlog",
        _read_histories_without_their_backlog,
        _rules("A1", "A2", "B11", "D2", "D4", "D7", "G3", "SimulationFailure", "AssertionError"),
    ),
    Mutation("C5/G3: resume from the prompt only", _resume_from_the_prompt, _rules("D4", "A5", "H5")),
    Mutation(
        "G4: resume before the token in flight",
        _resume_before_the_token_in_flight,
        _rules("A2", "D4", "AssertionError", "SimulationFailure"),
    ),
    Mutation(
        "G1: tokens in flight at a preemption are dropped",
        lambda patch: _drop_frames(patch, only_the_oldest=False),
        _rules("test_the_token_in_flight_at_a_preemption_is_delivered_once"),
        test_preemption.test_the_token_in_flight_at_a_preemption_is_delivered_once,
    ),
    Mutation(
        "G2: one frame is dropped, the next delivered",
        lambda patch: _drop_frames(patch, only_the_oldest=True),
        _rules("test_two_frames_in_flight_at_a_preemption_are_both_delivered"),
        test_preemption.test_two_frames_in_flight_at_a_preemption_are_both_delivered,
    ),
    Mutation("G5: the victim stays in the plan", _leave_the_victim_in_the_plan, _rules("B7")),
    Mutation("G6: the preempted lose their order", _lose_the_order_of_the_preempted, _rules("G6")),
    Mutation(
        "D2: the last output is fed too",
        _feed_the_last_output,
        _rules("probe_predictable_end"),
        probe_predictable_end,  # a wasted row changes no token
    ),
    Mutation(
        "D3: overrun tokens are delivered",
        lambda patch: _deliver_overrun(patch, only_aborted=False),
        _rules("D8"),
    ),
    Mutation(
        "F2: an abort does not suppress the token in flight",
        lambda patch: _deliver_overrun(patch, only_aborted=True),
        _rules("D8"),
    ),
    Mutation(
        "D5: length wins over stop",
        lambda patch: _check_end(patch, length_first=True, min_tokens_slack=0),
        _rules("D4"),
    ),
    Mutation(
        "J6: a stop id counts one output early",
        lambda patch: _check_end(patch, length_first=False, min_tokens_slack=1),
        _rules("test_min_tokens_ignores_early_stops_exactly"),
        test_ends.test_min_tokens_ignores_early_stops_exactly,  # the worker suppresses such a token anyway
    ),
    Mutation("F4: the aborted stay in the queue", _leave_the_aborted_in_the_queue, _rules("F4", "A8")),
    Mutation("M1: every chunk samples", _every_chunk_samples, _rules("A2", "A5")),
    Mutation("M3: one token over the budget", _budget_one_too_large, _rules("M3")),
    Mutation("A4: a position is fed twice", _feed_a_position_twice, _rules("A4")),
    Mutation("B3: the window is one step too wide", _window_one_too_wide, _rules("B3")),
    Mutation("B5: results of any epoch are accepted", _accept_results_of_any_epoch, _rules("B5", "StepMismatch")),
    Mutation("A2: U is not rolled back", _keep_placeholders_of_failed_steps, _rules("A2", "A5", "A6")),
    Mutation(
        "A4: fed again among holes",
        _feed_again_before_the_holes_are_back,
        _rules("A1", "A2", "A4", "D4", "AssertionError"),
    ),
    Mutation(
        "J10: a row fault is retried",
        _row_faults_are_retried,
        _rules("probe_row_fault"),
        probe_row_fault,
    ),
    Mutation("J4: draws depend on the step", _draws_depend_on_the_step, _rules("D4")),
)
