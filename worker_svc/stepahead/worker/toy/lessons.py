"""The toys of the teaching experiments: a score table, a running sum and a window sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from stepahead.worker.model.bundle import BundleFields, write_bundle
from stepahead.worker.model.cells import ResolvedStep
from stepahead.worker.runner import RowTrace
from stepahead.worker.toy.options import ToySpec
from stepahead.worker.toy.paged_integers import POISON
from stepahead.worker.toy.toy_runner import LogitToyRunner, ToyFacts, last_positions

WORDS = ("<start>", "Small", "steps", "help", "<end>")
START, END = 0, 4

SCORES = np.array(
    [
        # <start> Small steps help <end>
        [0, 9, 1, 0, 0],
        [0, 0, 8, 1, 0],
        [0, 0, 0, 7, 1],
        [0, 0, 0, 0, 9],
        [0, 0, 0, 0, 9],
    ],
    dtype=np.float32,
)
"""[last token, next token]."""


class ScoreTableRunner(LogitToyRunner):
    """The next token's scores depend on the last token only. A kv_slot holds its token.

    `loop=WORD` changes that word's row so that it prefers itself: generation then ends at its limit only.
    """

    def __init__(self, spec: ToySpec) -> None:
        self.scores = SCORES.copy()
        word = spec.take_word("loop", WORDS)
        if word is not None:
            row = WORDS.index(word)
            self.scores[row] = 0
            self.scores[row, row] = 9
        facts = ToyFacts(
            vocab_size=len(WORDS),
            eos_token_ids=spec.take_ids("eos", (END,), len(WORDS)),
            bos_token_id=START,
            max_context_tokens=spec.take_int("context", 4096, minimum=2),
            tokenizer_bundle=score_table_bundle(),
        )
        spec.finish(("loop", "eos", "context"))
        super().__init__(spec, facts)

    @override
    def _store(self, step: ResolvedStep) -> None:
        self._cache.write(step.slot_mapping, step.token_ids)

    @override
    def _look(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        last = self._cache.read(step, choice_rows, last_positions(step, choice_rows))
        self._unwritten = last == POISON
        self._logits = self.scores[np.where(self._unwritten, 0, last) % len(WORDS)]


class TracedRunner(LogitToyRunner):
    """A toy of sums that tells what it added and what its next token follows from."""

    def __init__(self, spec: ToySpec, facts: ToyFacts) -> None:
        super().__init__(spec, facts)
        self._row_traces: list[RowTrace] = []

    @override
    def _feed(self, step: ResolvedStep, choice_rows: NDArray[np.int64], prompt_tokens: NDArray[np.int64]) -> None:
        self._row_traces = []
        super()._feed(step, choice_rows, prompt_tokens)

    @override
    def _look_at_prompt(self, step: ResolvedStep, prompt_tokens: NDArray[np.int64]) -> None:
        traces = list(self._row_traces)
        super()._look_at_prompt(step, prompt_tokens)
        self._row_traces = traces  # what is added up for log probabilities is no part of the lesson

    @override
    def _traces(self) -> tuple[RowTrace, ...]:
        # Taken, so that a step of holes only, which feeds nothing, does not repeat the step before.
        traces, self._row_traces = tuple(self._row_traces), []
        return traces

    def _trace(self, step: ResolvedStep, row: int, *, num_additions: int, inputs: NDArray[np.int64]) -> None:
        values = tuple(inputs.tolist())
        self._row_traces.append(RowTrace(row=int(step.rows[row]), num_additions=num_additions, inputs=values))


def _sum_facts(spec: ToySpec) -> ToyFacts:
    vocab_size = spec.take_int("vocab", 10, minimum=10)
    return ToyFacts(
        vocab_size=vocab_size,
        eos_token_ids=spec.take_ids("eos", (), vocab_size),
        max_context_tokens=spec.take_int("context", 4096, minimum=2),
    )


def running_sum_runner(spec: ToySpec) -> TracedRunner:
    """Returns the running sum; `reuse=off` makes it add up the whole history for every token."""
    return RecomputedSumRunner(spec) if spec.take_word("reuse", ("on", "off")) == "off" else RunningSumRunner(spec)


class RunningSumRunner(TracedRunner):
    """Next token = (sum of the history) mod 10. A kv_slot holds the sum up to and including its position."""

    def __init__(self, spec: ToySpec) -> None:
        facts = _sum_facts(spec)
        spec.finish(("vocab", "reuse", "eos", "context"))
        super().__init__(spec, facts)

    @override
    def _store(self, step: ResolvedStep) -> None:
        starts, rows = step.query_start_loc, np.arange(len(step.rows))
        first = step.positions[starts[:-1]]
        before = np.zeros(len(rows), dtype=np.int64)
        continued = rows[first > 0]
        before[continued] = self._cache.read(step, continued, first[continued] - 1)
        for row, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            sums = before[row] + np.cumsum(step.token_ids[begin:end])
            if before[row] == POISON:
                sums[:] = POISON  # what builds on an unwritten sum is as good as unwritten
            self._cache.write(step.slot_mapping[begin:end], sums)
            self._trace(step, row, num_additions=end - begin, inputs=sums[-1:])

    @override
    def _look(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        sums = self._cache.read(step, choice_rows, last_positions(step, choice_rows))
        self._unwritten = sums == POISON
        self._prefer(np.where(self._unwritten, 0, sums) % 10)


class RecomputedSumRunner(TracedRunner):
    """The same tokens without reuse: a kv_slot holds its token, and every next token adds up the whole history."""

    def __init__(self, spec: ToySpec) -> None:
        facts = _sum_facts(spec)
        spec.finish(("vocab", "reuse", "eos", "context"))
        super().__init__(spec, facts)

    @override
    def _store(self, step: ResolvedStep) -> None:
        self._cache.write(step.slot_mapping, step.token_ids)

    @override
    def _look(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        sums = np.zeros(len(choice_rows), dtype=np.int64)
        self._unwritten = np.zeros(len(choice_rows), dtype=np.bool_)
        for choice, row in enumerate(choice_rows.tolist()):
            num_tokens = int(step.seq_lens[row])
            tokens = self._cache.read(step, np.full(num_tokens, row), np.arange(num_tokens))
            num_additions = 0
            for token in tokens.tolist():  # one by one: the number of additions is the lesson
                sums[choice] += token
                num_additions += 1
            self._unwritten[choice] = (tokens == POISON).any()
            self._trace(step, row, num_additions=num_additions, inputs=tokens)
        self._prefer(np.where(self._unwritten, 0, sums) % 10)


class WindowSumRunner(TracedRunner):
    """Next token = (sum of the last `width` processed tokens) mod 10. A kv_slot holds its token."""

    def __init__(self, spec: ToySpec) -> None:
        facts = _sum_facts(spec)
        self.width = spec.take_int("width", 3, minimum=1)
        spec.finish(("vocab", "width", "eos", "context"))
        super().__init__(spec, facts)

    @override
    def _store(self, step: ResolvedStep) -> None:
        self._cache.write(step.slot_mapping, step.token_ids)
        for row in range(len(step.rows)):
            window = self._window(step, row)
            self._trace(step, row, num_additions=len(window), inputs=window)

    @override
    def _look(self, step: ResolvedStep, choice_rows: NDArray[np.int64]) -> None:
        windows = [self._window(step, row) for row in choice_rows.tolist()]
        self._unwritten = np.array([(window == POISON).any() for window in windows], dtype=np.bool_)
        sums = np.array([window.sum() for window in windows], dtype=np.int64)
        self._prefer(np.where(self._unwritten, 0, sums) % 10)

    def _window(self, step: ResolvedStep, row: int) -> NDArray[np.int64]:
        """Reads the last processed tokens of a row, at most `width`, oldest first."""
        end = int(step.seq_lens[row])
        positions = np.arange(max(0, end - self.width), end)
        return self._cache.read(step, np.full(len(positions), row), positions)


def score_table_bundle() -> bytes:
    """Returns the score table's tokenizer: five words, split at spaces, `<start>` in front."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors  # noqa: PLC0415 - slow import

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType] - its stub says plain list
        [AddedToken(WORDS[START], special=True), AddedToken(WORDS[END], special=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{WORDS[START]} $A", special_tokens=[(WORDS[START], START)]
    )
    fields = BundleFields(
        bos_token=WORDS[START],
        eos_token=WORDS[END],
        bos_token_id=START,
        eos_token_ids=(END,),
        add_bos_token=True,
        generation_defaults={"temperature": 0.0},
    )
    return write_bundle(tokenizer.to_str(), fields)
