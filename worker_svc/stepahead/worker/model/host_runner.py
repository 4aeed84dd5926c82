"""What every runner whose device is the CPU shares: cells, holes and the results of a step.

A subclass feeds tokens and chooses tokens; this class decides which rows take part. A hole never reaches it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.reference.logprobs import LogprobEntries
from stepahead.worker.model.cells import ResolvedStep, SlotCells
from stepahead.worker.model.sampler import take_rows
from stepahead.worker.runner import (
    NO_LOGPROBS,
    CacheShape,
    ModelFacts,
    ProgressCallback,
    PromptTargets,
    RowLogprobs,
    RowTrace,
    SampleStatus,
    SamplingColumns,
    StepBatch,
    StepSamples,
)

_NO_TOKENS = np.zeros(0, np.int64)
_NO_STATUS = np.zeros(0, np.uint8)
# An enumeration's member costs as much to look up as the array operation it goes into.
_OK, _MISMATCH = int(SampleStatus.OK), int(SampleStatus.POSITION_MISMATCH)


class HostRunner(ABC):
    """Base of the CPU runners; implements `stepahead.worker.runner.Runner`.

    `sample` may be called with a batch whose `sample_rows` are some of those `forward` had: rows whose gate said
    SKIP are simply left out.
    """

    def __init__(self) -> None:
        self._cells = SlotCells(0)
        self._choice_of_row: dict[int, int] = {}
        self._hole_rows: frozenset[int] = frozenset()
        self._prompt_logprobs: RowLogprobs | None = None

    @abstractmethod
    def load(self, progress: ProgressCallback) -> ModelFacts:
        """See `Runner.load`."""

    @abstractmethod
    def _allocate_cache(self, shape: CacheShape) -> None:
        """Allocates the paged cache."""

    @abstractmethod
    def _change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """Copies blocks, then zeroes blocks."""

    @abstractmethod
    def _feed(self, step: ResolvedStep, choice_rows: NDArray[np.int64], prompt_tokens: NDArray[np.int64]) -> None:
        """Feeds the tokens.

        Args:
            step: what to feed.
            choice_rows: the step's rows that `_choose` may be asked about, in its order.
            prompt_tokens: the step's tokens that `_describe_prompt` is asked about next, if there are any.
        """

    @abstractmethod
    def _choose(self, choices: NDArray[np.int64], sampling: SamplingColumns) -> StepSamples:
        """Samples `choice_rows[choices]`; `sampling` has one row for each of them."""

    @abstractmethod
    def _describe_choices(
        self, choices: NDArray[np.int64], sampling: SamplingColumns, token_ids: NDArray[np.int64]
    ) -> LogprobEntries:
        """Log probabilities of what `choice_rows[choices]` have just sampled; all of them ask."""

    @abstractmethod
    def _describe_prompt(self, token_ids: NDArray[np.int64], top_k: NDArray[np.int64]) -> LogprobEntries:
        """RAW log probabilities: entry i of `token_ids[i]` after the i-th of `_feed`'s prompt tokens."""

    def _traces(self) -> tuple[RowTrace, ...]:
        """Of the step fed last, where the model is a teaching model."""
        return ()

    def allocate(self, shape: CacheShape) -> None:
        """See `Runner.allocate`."""
        self._cells = SlotCells(shape.num_slots)
        self._allocate_cache(shape)

    def reset(self) -> None:
        """See `Runner.reset`."""
        self._cells.reset()

    def forward(self, batch: StepBatch) -> None:
        """See `Runner.forward`."""
        step = self._cells.resolve(batch)
        if batch.copies or batch.zeroed_blocks:
            self._change_blocks(batch.copies, batch.zeroed_blocks)
        self._hole_rows = step.hole_rows
        chosen = choice_rows = batch.sample_rows.astype(np.int64)
        if step.hole_rows:
            chosen = np.asarray([row for row in chosen.tolist() if row not in step.hole_rows], np.int64)
            choice_rows = np.searchsorted(step.rows, chosen)
        self._choice_of_row = {row: choice for choice, row in enumerate(chosen.tolist())}
        self._prompt_logprobs = None
        if not len(step.rows):
            return
        targets = [target for target in batch.prompt_targets if target.row not in step.hole_rows]
        if targets:
            self._feed_described(batch, step, choice_rows, targets)
        else:
            self._feed(step, choice_rows, _NO_TOKENS)

    def _take_rows(self, sample_rows: NDArray[np.int32]) -> None:
        """What `sample` needs to know of a step without holes that a subclass fed by itself."""
        self._hole_rows = frozenset()
        self._choice_of_row = {row: choice for choice, row in enumerate(sample_rows.tolist())}
        self._prompt_logprobs = None

    def sample(self, batch: StepBatch) -> StepSamples:
        """See `Runner.sample`."""
        rows = batch.sample_rows.tolist()
        asked = choices = np.arange(len(rows))
        sampling = batch.sampling
        if self._hole_rows or len(rows) < len(self._choice_of_row):
            asked = np.asarray([index for index, row in enumerate(rows) if row not in self._hole_rows], np.int64)
            choices = np.asarray([self._choice_of_row[rows[index]] for index in asked], np.int64)
            sampling = sampling if len(asked) == len(rows) else take_rows(sampling, asked)
        if not len(asked):
            return self._samples_of(rows, asked, StepSamples(_NO_TOKENS, _NO_STATUS), None)
        samples = self._choose(choices, sampling)
        output_logprobs: RowLogprobs | None = None
        if sampling.logprobs is not None:
            output_logprobs = self._describe(batch, asked, choices, sampling, samples)
        if sampling.rule_states:
            _append_outputs(sampling, samples)
        written, token_ids = batch.sample_rows[asked], samples.token_ids
        if samples.status.any():
            good = samples.status == _OK
            written, token_ids = written[good], token_ids[good]
        self._cells.store(batch.slots[written], token_ids, batch.seq_lens[written].astype(np.int64))
        return self._samples_of(rows, asked, samples, output_logprobs)

    def _samples_of(
        self,
        rows: list[int],
        asked: NDArray[np.int64],
        samples: StepSamples,
        output_logprobs: RowLogprobs | None,
    ) -> StepSamples:
        """The samples of all rows: those in `asked` have some, the others fed no token at their position."""
        token_ids, status = samples.token_ids, samples.status
        if len(asked) < len(rows):
            token_ids, status = np.zeros(len(rows), np.int64), np.full(len(rows), _MISMATCH, np.uint8)
            token_ids[asked], status[asked] = samples.token_ids, samples.status
        return StepSamples(token_ids, status, self._traces(), output_logprobs, self._prompt_logprobs)

    def _feed_described(
        self,
        batch: StepBatch,
        step: ResolvedStep,
        choice_rows: NDArray[np.int64],
        targets: list[PromptTargets],
    ) -> None:
        """Feeds the tokens and keeps what `targets` ask for until the step is sampled."""
        counts = np.array([len(target.token_ids) for target in targets], np.int64)
        rows = np.array([target.row for target in targets], np.int64)
        starts: list[int] = step.query_start_loc[np.searchsorted(step.rows, rows)].tolist()
        tokens: list[NDArray[np.int64]] = [
            np.arange(start, start + count) for start, count in zip(starts, counts.tolist(), strict=True)
        ]
        self._feed(step, choice_rows, np.concatenate(tokens))
        top_k = np.repeat(np.array([target.top_k for target in targets], np.int64), counts)
        self._prompt_logprobs = RowLogprobs(
            rows=rows,
            first_positions=batch.positions[batch.query_start_loc[rows]] + 1,
            entry_counts=counts,
            entries=self._describe_prompt(np.concatenate([target.token_ids for target in targets]), top_k),
        )

    def _describe(
        self,
        batch: StepBatch,
        asked: NDArray[np.int64],
        choices: NDArray[np.int64],
        sampling: SamplingColumns,
        samples: StepSamples,
    ) -> RowLogprobs | None:
        """Log probabilities of the samples that want them; `asked` says which of the batch's these are."""
        assert sampling.logprobs is not None, "the caller looks whether a row asks"
        wanted = (samples.status == SampleStatus.OK) & (sampling.logprobs.top_k != NO_LOGPROBS)
        chosen = np.flatnonzero(wanted)
        if not len(chosen):
            return None
        rows = batch.sample_rows[asked[chosen]].astype(np.int64)
        return RowLogprobs(
            rows=rows,
            first_positions=batch.seq_lens[rows].astype(np.int64),
            entry_counts=np.ones(len(rows), np.int64),
            entries=self._describe_choices(choices[chosen], take_rows(sampling, chosen), samples.token_ids[chosen]),
        )


def _append_outputs(sampling: SamplingColumns, samples: StepSamples) -> None:
    """Tells the rules of every row that sampled, at once: the next step may sample before the host knows."""
    for row in np.flatnonzero(samples.status == SampleStatus.OK).tolist():
        state = sampling.rule_states[row]
        if state is not None:
            state.append(int(samples.token_ids[row]))
