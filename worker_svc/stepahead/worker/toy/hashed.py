"""Toys whose next token is a hash: of everything the cache lets a row read, or of the last token only."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from stepahead.kernels.cpu.logprobs import row_logprobs
from stepahead.kernels.reference.logprobs import LogprobEntries
from stepahead.kernels.reference.philox import draw_words
from stepahead.kernels.reference.sampling import GREEDY_BELOW, allowed_ids
from stepahead.worker.model.cells import ResolvedStep
from stepahead.worker.model.sampler import row_sampling
from stepahead.worker.runner import SampleStatus, SamplingColumns, StepBatch, StepSamples
from stepahead.worker.toy.options import ToySpec
from stepahead.worker.toy.paged_integers import POISON
from stepahead.worker.toy.toy_runner import ToyFacts, ToyRunner, last_positions

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SPIN_NS = 50_000


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns SplitMix64's finaliser of each value (Steele, Lea, Flood 2014): a bijection that looks random."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def token_tags(positions: NDArray[np.int64], token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the tag of each (position, token), 0 .. 2^63 - 1."""
    mixed = mix64(mix64(positions.astype(np.uint64) + _GOLDEN) + token_ids.astype(np.uint64))
    return (mixed >> np.uint64(1)).astype(np.int64)


class HashToyRunner(ToyRunner):
    """A toy whose next token is `state hash` mod the vocabulary, or that place among the allowed ids.

    With a temperature the row's Philox words are mixed into the hash. There are no scores, so top-k, top-p, min-p,
    penalties and biases have no meaning here. Log probabilities call every token equally likely: RAW every one of
    the vocabulary, PROCESSED every allowed one.
    """

    def __init__(self, spec: ToySpec, facts: ToyFacts) -> None:
        super().__init__(spec, facts)
        self._hashes = np.zeros(0, dtype=np.uint64)

    @override
    def _pick(self, choices: NDArray[np.int64], sampling: SamplingColumns) -> StepSamples:
        hashes = self._hashes[choices]
        drawn = np.flatnonzero(sampling.temperature >= GREEDY_BELOW)
        if len(drawn):
            words = draw_words(
                sampling.seed[drawn], sampling.choice_index[drawn], sampling.output_index[drawn]
            ).astype(np.uint64)
            hashes[drawn] = mix64(hashes[drawn] ^ ((words[:, 0] << np.uint64(32)) | words[:, 1]))
        token_ids = (hashes % np.uint64(self.facts.vocab_size)).astype(np.int64)
        status = np.full(len(choices), SampleStatus.OK, dtype=np.uint8)
        restricted = sampling.suppressed or sampling.masks or sampling.rule_states
        for row in range(len(choices)) if restricted else ():
            allowed = np.flatnonzero(allowed_ids(self.facts.vocab_size, row_sampling(sampling, row, 0.0)))
            if len(allowed):
                token_ids[row] = allowed[int(hashes[row]) % len(allowed)]
            else:
                status[row] = SampleStatus.NOTHING_ALLOWED
        return StepSamples(token_ids, status)

    @override
    def _look_at_prompt(self, step: ResolvedStep, prompt_tokens: NDArray[np.int64]) -> None:
        """Nothing: every token is as likely as any other."""

    @override
    def _describe_choices(
        self, choices: NDArray[np.int64], sampling: SamplingColumns, token_ids: NDArray[np.int64]
    ) -> LogprobEntries:
        asked = sampling.logprobs
        assert asked is not None, "the caller looks whether a row asks"
        log_weights = np.zeros((len(choices), self.facts.vocab_size), dtype=np.float32)
        for row in np.flatnonzero(asked.processed).tolist():
            allowed = allowed_ids(self.facts.vocab_size, row_sampling(sampling, row, 0.0))
            log_weights[row, ~allowed] = -np.inf
        return row_logprobs(log_weights, token_ids, asked.top_k)

    @override
    def _describe_prompt(self, token_ids: NDArray[np.int64], top_k: NDArray[np.int64]) -> LogprobEntries:
        uniform = np.zeros(self.facts.vocab_size, dtype=np.float32)
        return row_logprobs(repeat(uniform, len(token_ids)), token_ids, top_k)


class TaggedRunner(HashToyRunner):
    """Every kv_slot holds the tag of its (position, token); the next token depends on every tag of the context.

    A stale, foreign, misplaced or missing block therefore changes the tokens that follow: the model for tests of
    block ownership, preemption and replay.
    """

    def __init__(self, spec: ToySpec) -> None:
        vocab_size = spec.take_int("vocab", 257, minimum=1)
        facts = ToyFacts(
            vocab_size=vocab_size,
            eos_token_ids=spec.take_ids("eos", (), vocab_size),
            max_context_tokens=spec.take_int("context", 4096, minimum=2),
        )
        spec.finish(("vocab", "eos", "context"))
        super().__init__(spec, facts)

    @override
    def _store(self, step: ResolvedStep) -> None:
        self._cache.write(step.slot_mapping, token_tags(step.positions, step.token_ids))

    @override
    def _look(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        lengths = step.seq_lens[choice_rows].astype(np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        positions = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(starts, lengths)
        tags = self._cache.read(step, np.repeat(choice_rows, lengths), positions)
        self._unwritten = np.logical_or.reduceat(tags == POISON, starts)
        # The place a tag was read from is mixed in, so that two swapped blocks do not cancel out in the sum.
        places = positions.astype(np.uint64) * _GOLDEN
        self._hashes = mix64(np.add.reduceat(mix64(tags.astype(np.uint64) ^ places), starts))


class SleepRunner(HashToyRunner):
    """A device that computes nothing for exactly `ms`: measures everything around it. A kv_slot holds its token.

    The next token is a hash of (last token, its position).
    """

    def __init__(self, spec: ToySpec) -> None:
        vocab_size = spec.take_int("vocab", 1000, minimum=1)
        self._sleep_ns = round(spec.take_float("ms", 5.0) * 1e6)
        facts = ToyFacts(
            vocab_size=vocab_size,
            eos_token_ids=spec.take_ids("eos", (), vocab_size),
            max_context_tokens=spec.take_int("context", 4096, minimum=2),
        )
        spec.finish(("vocab", "ms", "eos", "context"))
        super().__init__(spec, facts)
        self._tell_end: Callable[[], object] = _nothing

    def tell_ends_by(self, tell_end: Callable[[], object]) -> None:
        """See `PlaysDevice`."""
        self._tell_end = tell_end

    @override
    def forward(self, batch: StepBatch) -> None:
        end_ns = time.perf_counter_ns() + self._sleep_ns
        self._tell_end()
        super().forward(batch)
        wait_until(end_ns)

    @override
    def _store(self, step: ResolvedStep) -> None:
        self._cache.write(step.slot_mapping, step.token_ids)

    @override
    def _look(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        last = last_positions(step, choice_rows)
        token_ids = self._cache.read(step, choice_rows, last)
        self._unwritten = token_ids == POISON
        self._hashes = mix64(token_tags(last, token_ids).astype(np.uint64))


def _nothing() -> None:
    """Nobody waits for an end."""


def wait_until(end_ns: int) -> None:
    """Returns at `end_ns` of time.perf_counter_ns: sleeps most of the time and spins at most the last 50 us.

    A sleep alone wakes some 60 us late, which is several percent of a 2 ms step.
    """
    rest_ns = end_ns - time.perf_counter_ns() - _SPIN_NS
    if rest_ns > 0:
        time.sleep(rest_ns / 1e9)
    while time.perf_counter_ns() < end_ns:
        pass
