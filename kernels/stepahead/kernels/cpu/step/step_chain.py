"""Steps that begin by themselves when the one before has ended: `csrc/chain.h`.

    host thread    plan 1, start     plan 2, follow          plan 3, follow
    library                   |step 1 ..............|step 2 .................|step 3 ...
    device thread             wait 1                |tells    wait 2         |tells

What a greedy step samples is known inside the library, so the step behind it needs nobody. Any other step ends the
chain: its caller samples, then starts the next one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepahead.kernels.cpu.step.library import ChainedStep, StepState
from stepahead.kernels.cpu.step.step_inputs import AllocatedModel, StepInputs, StepOutputs, step_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stepahead.kernels.ops import StepLayout


@dataclass(frozen=True, slots=True)
class Cells:
    """What each slot sampled last; contiguous, read and written by the library while a chain runs."""

    token_ids: NDArray[np.int64]  # [num_slots]
    positions: NDArray[np.int64]  # [num_slots], where the token is fed; -1: the cell is empty


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """How a step's rows use the cells."""

    slots: NDArray[np.int32]  # [num_rows]
    sample_rows: NDArray[np.int32]  # [num_logits], the row of each logit token
    emptied_slots: NDArray[np.int32]  # their cells are emptied before the step


class PlannedStep:
    """A step that can run without another look at it. Made by `StepChain.plan`.

    Args:
        inputs: checked.
        cells: of the chain.
        columns: checked.
        greedy: whether it is.
    """

    __slots__ = ("_columns", "_inputs", "abandoned", "greedy", "raw")

    def __init__(self, inputs: StepInputs, cells: Cells, columns: SlotColumns, *, greedy: bool) -> None:
        self._inputs = inputs
        self._columns = columns
        self.greedy = greedy
        self.abandoned = False
        """It never ran, and never will."""
        self.raw = ChainedStep(
            batch=inputs.batch,
            cell_tokens=cells.token_ids.ctypes.data,
            cell_positions=cells.positions.ctypes.data,
            slots=columns.slots.ctypes.data,
            sample_rows=columns.sample_rows.ctypes.data,
            emptied_slots=columns.emptied_slots.ctypes.data,
            num_emptied=len(columns.emptied_slots),
            greedy=int(greedy),
        )

    @property
    def outputs(self) -> StepOutputs:
        """Once it has ended."""
        return self._inputs.outputs

    @property
    def started_ns(self) -> int:
        """On the monotonic clock, nanoseconds; 0 before it has begun."""
        return self.raw.started_ns

    @property
    def ended_ns(self) -> int:
        """On the monotonic clock, nanoseconds; 0 before it has ended."""
        return self.raw.ended_ns


class StepChain:
    """Runs the steps of one `DecoderStep`. `plan` and `follow` are one thread's, `start` and `wait` another one's.

    Args:
        check_open: raises ValueError once the model is freed, and keeps it from being freed unasked.
        model: that runs the steps.
        cells: of all slots.
    """

    def __init__(self, check_open: Callable[[], None], model: AllocatedModel, cells: Cells) -> None:
        for name, column in (("token_ids", cells.token_ids), ("positions", cells.positions)):
            if column.dtype != np.int64 or column.shape != (len(cells.positions),) or not column.flags.c_contiguous:
                raise ValueError(f"{name} must be int64 [num_slots], contiguous")
        self._library, self._handle = model.library, model.handle
        self._model = model
        self._check_open = check_open
        self._cells = cells
        self._kept: list[PlannedStep] = []  # the library may still look at them

    def plan(
        self,
        token_ids: NDArray[np.int64],
        layout: StepLayout,
        logit_tokens: NDArray[np.int64],
        columns: SlotColumns,
        *,
        logits: NDArray[np.float32] | None,
    ) -> PlannedStep:
        """Returns a step; nothing runs yet.

        Args:
            token_ids: [num_tokens], LAST_SAMPLE where the row feeds its slot's cell.
            layout: where they go.
            logit_tokens: [num_logits] indexes into token_ids, the last token of each of `columns.sample_rows`.
            columns: the rows' slots.
            logits: [num_logits, vocab_size] to write to; None: the step is greedy, each of its sampling rows takes
                its largest logit and writes its cell, unless that logit is not finite.

        Raises:
            ValueError: an array has another shape than the layout says, an entry is out of range, or the model is
                closed.
        """
        self._check_open()
        num_rows, num_slots = len(layout.seq_lens), len(self._cells.positions)
        for name, column, count, end in (
            ("slots", columns.slots, num_rows, num_slots),
            ("sample_rows", columns.sample_rows, len(logit_tokens), num_rows),
            ("emptied_slots", columns.emptied_slots, len(columns.emptied_slots), num_slots),
        ):
            if column.dtype != np.int32 or column.shape != (count,) or not column.flags.c_contiguous:
                raise ValueError(f"{name} must be int32 [{count}], contiguous")
            if count and (column.min() < 0 or column.max() >= end):
                raise ValueError(f"{name}: an entry is outside 0..{end - 1}")
        inputs = step_inputs(self._model, token_ids, layout, logit_tokens, logits, chained=True)
        planned = PlannedStep(inputs, self._cells, columns, greedy=logits is None)
        passed = int(self._library.step_passed(self._handle))
        self._kept = [step for step in self._kept if not (step.abandoned or 0 < step.raw.ordinal <= passed)]
        self._kept.append(planned)
        return planned

    def follow(self, before: PlannedStep, planned: PlannedStep) -> bool:
        """Has `planned` begin when `before` ends; False: too late, or `before` is not greedy.

        Raises:
            ValueError: the model is closed.
        """
        self._check_open()
        return bool(self._library.step_follow(self._handle, ctypes.byref(before.raw), ctypes.byref(planned.raw)))

    def start(self, planned: PlannedStep) -> bool:
        """Starts a step that follows on nothing, behind everything that runs.

        Returns:
            False if a cell that it feeds from holds nothing for its position: it never runs.

        Raises:
            ValueError: the model is closed.
        """
        self._check_open()
        started = bool(self._library.step_start(self._handle, ctypes.byref(planned.raw)))
        planned.abandoned = not started
        return started

    def wait(self, planned: PlannedStep) -> bool:
        """Waits until a step that was started or attached has ended.

        Returns:
            False if it was dropped: see `start`, or the step before it was.
        """
        planned.abandoned = self._library.step_wait(ctypes.byref(planned.raw)) == StepState.DROPPED
        return not planned.abandoned
