"""Base of the toy runners."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from stepahead.kernels.cpu.logprobs import row_logprobs
from stepahead.kernels.reference.logprobs import LogprobEntries
from stepahead.worker.model.cells import ResolvedStep
from stepahead.worker.model.host_runner import HostRunner
from stepahead.worker.model.sampler import describe_samples, sample_logits
from stepahead.worker.runner import (
    CacheShape,
    ModelFacts,
    ProgressCallback,
    SampleStatus,
    SamplingColumns,
    StepSamples,
)
from stepahead.worker.toy.options import ToySpec
from stepahead.worker.toy.paged_integers import KV_BYTES_PER_TOKEN, PagedIntegers


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyFacts:
    """What a toy says of itself."""

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    max_context_tokens: int = 4096
    tokenizer_bundle: bytes = b""


class ToyRunner(HostRunner):
    """A runner over `PagedIntegers`; a subclass says what a kv_slot holds and what follows from it."""

    def __init__(self, spec: ToySpec, facts: ToyFacts) -> None:
        super().__init__()
        self._spec = spec
        self.facts = facts
        self._cache = PagedIntegers(0, 1)
        self._unwritten = np.zeros(0, dtype=np.bool_)

    @override
    def load(self, progress: ProgressCallback) -> ModelFacts:
        """See `Runner.load`."""
        progress("weights", 0, 0)
        facts = self.facts
        return ModelFacts(
            name=self._spec.text,
            fingerprint=hashlib.sha256(self._spec.text.encode()).hexdigest(),
            vocab_size=facts.vocab_size,
            max_context_tokens=facts.max_context_tokens,
            eos_token_ids=facts.eos_token_ids,
            bos_token_id=facts.bos_token_id,
            dtype="int64",
            weight_bytes=0,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            device="cpu",
            tokenizer_bundle=facts.tokenizer_bundle,
        )

    @override
    def _allocate_cache(self, shape: CacheShape) -> None:
        self._cache = PagedIntegers(shape.num_blocks, shape.block_size)

    @override
    def _change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        self._cache.change_blocks(copies, zeroed)

    @override
    def _feed(self, step: ResolvedStep, choice_rows: NDArray[np.int64], prompt_tokens: NDArray[np.int64]) -> None:
        self._cache.begin_blocks(step.slot_mapping)
        self._store(step)
        if len(prompt_tokens):
            self._look_at_prompt(step, prompt_tokens)
        self._unwritten = np.zeros(len(choice_rows), dtype=np.bool_)
        if len(choice_rows):
            self._look(step, choice_rows)

    @override
    def _choose(self, choices: NDArray[np.int64], sampling: SamplingColumns) -> StepSamples:
        samples = self._pick(choices, sampling)
        status = samples.status.copy()
        status[self._unwritten[choices]] = SampleStatus.NON_FINITE
        return StepSamples(samples.token_ids, status)

    @abstractmethod
    def _store(self, step: ResolvedStep) -> None:
        """Writes the kv_slots of the step's tokens."""

    @abstractmethod
    def _look(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        """Reads through the block tables what the next token of `choice_rows` depends on."""

    @abstractmethod
    def _look_at_prompt(self, step: ResolvedStep, prompt_tokens: NDArray[np.int64]) -> None:
        """Reads what `_describe_prompt` must know of the tokens that follow some of the step's tokens."""

    @abstractmethod
    def _pick(self, choices: NDArray[np.int64], sampling: SamplingColumns) -> StepSamples:
        """Returns tokens for some of the rows `_look` saw."""


class LogitToyRunner(ToyRunner):
    """A toy with a score for every token: the real sampler decides."""

    def __init__(self, spec: ToySpec, facts: ToyFacts) -> None:
        super().__init__(spec, facts)
        self._logits = np.zeros((0, facts.vocab_size), dtype=np.float32)
        self._prompt_logits = self._logits

    @override
    def _pick(self, choices: NDArray[np.int64], sampling: SamplingColumns) -> StepSamples:
        return sample_logits(np.ascontiguousarray(self._logits[choices]), sampling)

    @override
    def _look_at_prompt(self, step: ResolvedStep, prompt_tokens: NDArray[np.int64]) -> None:
        # Each token as the last one of a row of its own.
        rows = np.repeat(np.arange(len(step.rows)), np.diff(step.query_start_loc))[prompt_tokens]
        seq_lens = (step.positions[prompt_tokens] + 1).astype(np.int32)
        self._look(
            replace(step, rows=step.rows[rows], seq_lens=seq_lens, block_tables=step.block_tables[rows]),
            np.arange(len(rows)),
        )
        self._prompt_logits = np.where(self._unwritten[:, None], np.float32(np.nan), self._logits)

    @override
    def _describe_choices(
        self, choices: NDArray[np.int64], sampling: SamplingColumns, token_ids: NDArray[np.int64]
    ) -> LogprobEntries:
        return describe_samples(np.ascontiguousarray(self._logits[choices]), sampling, token_ids)

    @override
    def _describe_prompt(self, token_ids: NDArray[np.int64], top_k: NDArray[np.int64]) -> LogprobEntries:
        return row_logprobs(np.ascontiguousarray(self._prompt_logits), token_ids, top_k)

    def _prefer(self, token_ids: NDArray[np.int64]) -> None:
        """Scores the given token of each row 9 and all others 0."""
        self._logits = np.zeros((len(token_ids), self.facts.vocab_size), dtype=np.float32)
        self._logits[np.arange(len(token_ids)), token_ids] = 9.0


def last_positions(step: ResolvedStep, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the position each row feeds last."""
    return step.seq_lens[rows].astype(np.int64) - 1
