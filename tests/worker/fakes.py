"""Runners that compute nothing, so that tests can predict, stop and break them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable

import numpy as np

from stepahead.worker.errors import ModelError
from stepahead.worker.runner import (
    LAST_SAMPLE,
    NO_POSITION,
    CacheShape,
    ModelFacts,
    ProgressCallback,
    SampleStatus,
    StepBatch,
    StepSamples,
)

VOCAB_SIZE = 40


def next_token(token: int, position: int) -> int:
    """What the fake model says after `token` at `position`."""
    return (5 * token + position + 1) % VOCAB_SIZE


def continuation(history: list[int], count: int) -> list[int]:
    """The greedy continuation of a history, computed one token after another."""
    tokens = list(history)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(history) :]


class FakeRunner:
    """Follows the `Runner` contract: cells, holes, masks. Its results are one buffer, overwritten by each step.

    Attributes:
        batches: every batch forwarded.
        fed: (slot, position, token) of everything fed, in order.
    """

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []
        self.fed: list[tuple[int, int, int]] = []
        self.num_resets = 0
        self.non_finite_slots: set[int] = set()
        self.threads: set[int] = set()
        self._last_fed: dict[int, tuple[int, int]] = {}
        self._holes: set[int] = set()
        self._tokens = np.zeros(0, np.int64)
        self._status = np.zeros(0, np.uint8)

    def load(self, progress: ProgressCallback) -> ModelFacts:
        self.threads.add(threading.get_ident())
        progress("weights", 10, 10)
        return ModelFacts(
            name="fake",
            fingerprint="f" * 64,
            vocab_size=VOCAB_SIZE,
            max_context_tokens=64,
            eos_token_ids=(0,),
            bos_token_id=None,
            dtype="int64",
            weight_bytes=10,
            kv_bytes_per_token=8,
            device="cpu",
            tokenizer_bundle=bytes(range(256)) * 6000,
        )

    def allocate(self, shape: CacheShape) -> None:
        self.threads.add(threading.get_ident())
        self._cell_token = np.zeros(shape.num_slots, np.int64)
        self._cell_position = np.full(shape.num_slots, NO_POSITION, np.int64)
        self._tokens = np.zeros(shape.max_num_seqs, np.int64)
        self._status = np.zeros(shape.max_num_seqs, np.uint8)

    def reset(self) -> None:
        self.num_resets += 1
        self._cell_position[:] = NO_POSITION

    def forward(self, batch: StepBatch) -> None:
        self.threads.add(threading.get_ident())
        self.batches.append(batch)
        self._cell_position[batch.invalidated_slots] = NO_POSITION
        self._last_fed, self._holes = {}, set()
        for row, slot in enumerate(batch.slots.tolist()):
            span = slice(int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1]))
            for token, position in zip(batch.token_ids[span], batch.positions[span], strict=True):
                if token == LAST_SAMPLE and self._cell_position[slot] != position:
                    self._holes.add(row)
                    break
                value = int(self._cell_token[slot] if token == LAST_SAMPLE else token)
                self.fed.append((slot, int(position), value))
                self._last_fed[row] = (value, int(position))

    def sample(self, batch: StepBatch) -> StepSamples:
        count = len(batch.sample_rows)
        for index, row in enumerate(batch.sample_rows.tolist()):
            self._status[index] = self._sample_row(batch, index, row)
        return StepSamples(self._tokens[:count], self._status[:count])

    def _sample_row(self, batch: StepBatch, index: int, row: int) -> int:
        slot = int(batch.slots[row])
        if row in self._holes:
            return SampleStatus.POSITION_MISMATCH
        if slot in self.non_finite_slots:
            return SampleStatus.NON_FINITE
        token = next_token(*self._last_fed[row])
        mask = batch.sampling.masks[index] if batch.sampling.masks else None
        if mask is not None:
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:VOCAB_SIZE])
            if not len(allowed):
                return SampleStatus.NOTHING_ALLOWED
            token = int(allowed[0])
        self._tokens[index] = token
        self._cell_token[slot], self._cell_position[slot] = token, batch.seq_lens[row]
        return SampleStatus.OK


class HandClockRunner(FakeRunner):
    """A device that moves only when told to: `allow_forward` and `allow_sample` let one call each go on.

    `wait_until` tells when the device stands in a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._allowed = {"forward": 0, "sample": 0}
        self._at: tuple[str, int] | None = None

    def allow_forward(self, count: int = 1) -> None:
        self._allow("forward", count)

    def allow_sample(self, count: int = 1) -> None:
        self._allow("sample", count)

    def wait_until(self, call: str, step_id: int) -> None:
        """Blocks until the device stands in `call` of a step."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._at == (call, step_id), timeout=10), (
                self._at,
                call,
                step_id,
            )

    def forward(self, batch: StepBatch) -> None:
        self._stand("forward", batch.step_id)
        super().forward(batch)

    def sample(self, batch: StepBatch) -> StepSamples:
        self._stand("sample", batch.step_id)
        return super().sample(batch)

    def _allow(self, call: str, count: int) -> None:
        with self._changed:
            self._allowed[call] += count
            self._changed.notify_all()

    def _stand(self, call: str, step_id: int) -> None:
        with self._changed:
            self._at = (call, step_id)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._allowed[call] > 0)
            self._allowed[call] -= 1
            self._at = None


class BrokenRunner(FakeRunner):
    """Raises in the forward of one step."""

    def __init__(self, step_id: int, error: Callable[[], Exception] = lambda: ValueError("secret text")) -> None:
        super().__init__()
        self._step_id = step_id
        self._error = error

    def forward(self, batch: StepBatch) -> None:
        if batch.step_id == self._step_id:
            raise self._error()
        super().forward(batch)


class StuckLoad(FakeRunner):
    """Never finishes loading."""

    def load(self, progress: ProgressCallback) -> ModelFacts:
        threading.Event().wait()
        return super().load(progress)


class StuckInCompiler(FakeRunner):
    """Waits for a process while it loads, which waits for one of its own."""

    def load(self, progress: ProgressCallback) -> ModelFacts:
        command = ["sh", "-c", "sleep 3600 & echo started; wait"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as compiler:
            assert compiler.stdout is not None
            compiler.stdout.readline()
            progress("weights", 1, 1)
            compiler.wait()
        return super().load(progress)


def make_unloadable() -> FakeRunner:
    """Fails as a runner does that finds no model."""
    raise ModelError("no such model: give a folder")
