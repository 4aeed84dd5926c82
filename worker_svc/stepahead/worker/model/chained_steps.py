"""The steps a native engine is told about ahead, so that each begins when the one before has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepahead.kernels.cpu.step.step_chain import PlannedStep, SlotColumns, StepChain
from stepahead.kernels.ops import StepLayout
from stepahead.kernels.reference.sampling import GREEDY_BELOW
from stepahead.worker.runner import DeviceTimes, SampleStatus, StepSamples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepahead.worker.model.cells import ResolvedStep
    from stepahead.worker.runner import SamplingColumns, StepBatch

_OK, _NON_FINITE = int(SampleStatus.OK), int(SampleStatus.NON_FINITE)


class ChainedSteps:
    """Plans steps on the host thread and runs them on the device thread.

        host thread     announce(N+1): plan, attach to N, which runs
        device thread   run(N) ... sample(N)    run(N+1): has begun long ago

    Args:
        chain: of the engine.
        logits: [max_num_seqs, vocab_size], where a step that is not greedy leaves them.
    """

    def __init__(self, chain: StepChain, logits: NDArray[np.float32]) -> None:
        self._chain = chain
        self._logits = logits
        self._newest: PlannedStep | None = None  # host thread only
        # By the batch's identity: step ids begin again with an epoch. Each entry is put in before its forward is
        # submitted and taken out by it.
        self._planned: dict[int, tuple[PlannedStep, bool]] = {}

    def announce(self, batch: StepBatch, *, gated: bool) -> None:
        """See `PlansAhead.announce`."""
        before, self._newest = self._newest, None
        if (
            batch.copies
            or batch.zeroed_blocks
            or batch.prompt_targets
            or len(batch.sample_rows) > len(self._logits)
        ):
            return
        greedy = not gated and is_greedy(batch.sampling)
        planned = self._chain.plan(
            batch.token_ids,
            step_layout(batch),
            batch.query_start_loc[batch.sample_rows + 1].astype(np.int64) - 1,
            SlotColumns(batch.slots, batch.sample_rows, batch.invalidated_slots),
            logits=None if greedy else self._logits[: len(batch.sample_rows)],
        )
        attached = before is not None and before.greedy and self._chain.follow(before, planned)
        self._planned[id(batch)] = planned, attached
        self._newest = planned

    def break_off(self) -> None:
        """See `PlansAhead.break_off`."""
        self._newest = None

    def run(self, batch: StepBatch) -> PlannedStep | None:
        """Runs an announced step to its end, on the device thread.

        Returns:
            None: it has not run, and must be fed otherwise; it was not planned, or a row of it is a hole.
        """
        planned, attached = self._planned.pop(id(batch), (None, False))
        if planned is None or not (attached or self._chain.start(planned)) or not self._chain.wait(planned):
            return None
        return planned


def step_layout(step: StepBatch | ResolvedStep) -> StepLayout:
    """Returns where a step's tokens go, for the kernels."""
    return StepLayout(
        positions=step.positions,
        slot_mapping=step.slot_mapping,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        block_tables=step.block_tables,
        more_groups=step.more_groups,
        floors=step.floors,
    )


def is_greedy(sampling: SamplingColumns) -> bool:
    """Whether each row takes its largest logit, whatever came before, and nobody asks how likely it was."""
    restrictions = (*sampling.suppressed, *sampling.masks, *sampling.rule_states)
    plain = all(entry is None for entry in restrictions) and sampling.logprobs is None
    return plain and bool((sampling.temperature < GREEDY_BELOW).all())


def greedy_samples(planned: PlannedStep) -> StepSamples:
    """Returns what a greedy step sampled."""
    outputs = planned.outputs
    status = np.where(np.isfinite(outputs.best_logits), _OK, _NON_FINITE).astype(np.uint8)
    return StepSamples(outputs.best_ids, status)


def times_of(planned: PlannedStep) -> DeviceTimes:
    """Returns when a step ran."""
    return DeviceTimes(planned.started_ns, planned.ended_ns, with_sampling=planned.greedy)
