"""Deliberate breakages of constrained output, which only constrained requests can notice; see mutations.py."""

# pyright: reportPrivateUsage=false
# A mutation replaces private functions; that is its purpose.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from stepahead.scheduler import gates as gates_module
from stepahead.scheduler.convert import gate_to_proto
from stepahead.scheduler.core import planning
from stepahead.scheduler.core import scheduler as scheduler_module
from stepahead.scheduler.core.committing import Finish
from stepahead.scheduler.core.events import CommitOutcome, Finished, GateRow
from stepahead.scheduler.core.ids import LaneId, RequestKey, StepId
from stepahead.scheduler.core.lane import Lane
from stepahead.scheduler.core.plan import Admission, RowFault, StepResult
from stepahead.scheduler.core.scheduler import Scheduler
from stepahead.scheduler.core.sequence import Stay
from stepahead.scheduler.core.step_in_flight import StepInFlight
from stepahead.scheduler.gates import Gates, Masks
from stepahead.scheduler.worker_link import WorkerLink
from stepahead.v1 import worker_pb2
from tests.simulation.fake_worker import FakeWorker, Row, Slot


def open_before_the_grammars_advance(patch: pytest.MonkeyPatch) -> None:
    """A mask lacks the newest token (I1): two calls of a turn are swapped."""
    advance, open_gate = Gates.advance, Gates.open
    put_off: list[tuple[CommitOutcome, dict[RequestKey, Finished]]] = []

    def advance_later(_: Gates, outcome: CommitOutcome, ended: dict[RequestKey, Finished]) -> None:
        put_off.append((outcome, ended))

    def open_first(gates: Gates, link: WorkerLink) -> None:
        open_gate(gates, link)
        while put_off:
            advance(gates, *put_off.pop())

    patch.setattr(Gates, "advance", advance_later)
    patch.setattr(Gates, "open", open_first)


def allow_everything_without_a_mask(patch: pytest.MonkeyPatch) -> None:
    """A row whose gate is overdue samples as if it were not constrained (I2)."""
    sample = FakeWorker._sample

    def mutant(worker: FakeWorker, row: Row, slot: Slot, context: int) -> None:
        if row.gate is not None and not row.gate.arrived:
            row.gate.masks[row.slot] = frozenset(range(worker.vocab))
        sample(worker, row, slot, context)

    patch.setattr(FakeWorker, "_sample", mutant)


def name_the_position_after(patch: pytest.MonkeyPatch) -> None:
    """A gate names what its rows feed next (I3)."""
    constrained_rows = planning._constrained_rows

    def mutant(step: StepInFlight) -> list[tuple[Stay, int]]:
        return [(stay, position + 1) for stay, position in constrained_rows(step)]

    patch.setattr(planning, "_constrained_rows", mutant)


def leave_ended_rows_out(patch: pytest.MonkeyPatch) -> None:
    """A gate names only the rows whose sample counts (I3); the others wait."""
    gate_rows = Scheduler.gate_rows

    def mutant(scheduler: Scheduler, lane_id: LaneId) -> tuple[StepId, list[GateRow]] | None:
        found = gate_rows(scheduler, lane_id)
        return found and (found[0], [row for row in found[1] if row.wanted])

    patch.setattr(Scheduler, "gate_rows", mutant)


def mix_the_masks_up(patch: pytest.MonkeyPatch) -> None:
    """A row gets the mask of another row of its step (I3)."""

    def mutant(
        step_id: StepId, rows: Sequence[GateRow], masks: Mapping[RequestKey, bytes]
    ) -> worker_pb2.SampleGate:
        gate = gate_to_proto(step_id, rows, masks)
        mixed_up = list(reversed(gate.masks))
        del gate.masks[:]
        gate.masks.extend(mixed_up)
        return gate

    patch.setattr(gates_module, "gate_to_proto", mutant)


def send_masks_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    """A worker that has started again gets the masks that the one before it had asked for (I3, O2)."""
    made_for = Gates._made

    def mutant(gates: Gates, link: WorkerLink, _: int, *rest: Any) -> None:
        made_for(gates, link, link.worker_epoch, *rest)

    patch.setattr(Gates, "_made", mutant)


def send_no_gate_after_a_cancel(patch: pytest.MonkeyPatch) -> None:
    """Masks are thrown away when one of their requests is gone; its neighbours wait (O8, F5)."""
    made_for = Gates._made

    def mutant(
        gates: Gates,
        link: WorkerLink,
        epoch: int,
        step_id: StepId,
        rows: list[GateRow],
        keys: list[RequestKey],
        made: asyncio.Future[Masks],
    ) -> None:
        if all(key in gates._book.choices for key in keys):
            made_for(gates, link, epoch, step_id, rows, keys, made)

    patch.setattr(Gates, "_made", mutant)


def try_again_what_nothing_can_follow(patch: pytest.MonkeyPatch) -> None:
    """A row whose mask and suppressed ids leave nothing is fed again, as one without a mask (I7)."""
    commit_step = scheduler_module.commit_step

    def mutant(lane: Lane, result: StepResult, finish: Finish) -> CommitOutcome:
        faults = {key: fault for key, fault in result.faults.items() if fault is not RowFault.NOTHING_ALLOWED}
        return commit_step(lane, replace(result, faults=faults), finish)

    patch.setattr(scheduler_module, "commit_step", mutant)


def begin_anew_on_another_lane(patch: pytest.MonkeyPatch) -> None:
    """A grammar forgets what was delivered when a worker is lost (I4)."""

    def mutant(gates: Gates, _: WorkerLink) -> None:
        for matcher in gates._matchers.values():
            del matcher.accepted[:]  # type: ignore[attr-defined] - the simulation's

    patch.setattr(Gates, "forget", mutant)


def all_choices_draw_alike(patch: pytest.MonkeyPatch) -> None:
    """The choices of a request have one random stream (J5)."""
    admission = planning._admission

    def mutant(stay: Stay) -> Admission:
        good = admission(stay)
        return replace(good, sampling=replace(good.sampling, choice_index=0))

    patch.setattr(planning, "_admission", mutant)


TABLE: list[tuple[str, Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = [
    ("I1: a gate opens before the grammars advance", open_before_the_grammars_advance, ("I1", "I2")),
    ("I2: without a mask everything is allowed", allow_everything_without_a_mask, ("I2",)),
    ("I3: a gate names the position after", name_the_position_after, ("I3",)),
    ("I3: ended rows are left out of a gate", leave_ended_rows_out, ("I3", "O8")),
    ("I3: rows get each other's masks", mix_the_masks_up, ("I2", "D4")),
    ("I3: masks of any epoch are sent", send_masks_of_any_epoch, ("I3",)),
    ("O8: a cancel holds its neighbours' gate back", send_no_gate_after_a_cancel, ("O8", "A8")),
    ("I7: nothing can follow, and it is tried again", try_again_what_nothing_can_follow, ("I7",)),
    ("I4: a grammar begins anew on another lane", begin_anew_on_another_lane, ("I1", "I2", "I5", "I7")),
    ("J5: all choices draw alike", all_choices_draw_alike, ("D4",)),
]
"""(the rule and how it is broken, the mutation, rules that may notice)."""
