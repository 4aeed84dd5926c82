"""The seam between the executor and a model: what one step looks like, and what a runner does with it.

The executor's host thread turns a step plan into a `StepBatch` of plain NumPy arrays; the device thread hands
it to a `Runner`. A runner owns everything on the device: weights, the paged KV cache and, per slot, the *cell*
that holds (last sampled token, the position that token will be fed at). No other thread calls a runner, torch
included (a second thread that enters OpenMP slows every later forward by a third).

    token_ids      t t t t | -1 | -1 | t t        -1: "feed what this slot sampled last" (its cell)
    query_start_loc 0        4    5    6    8
    rows            chunk 0  decode    chunk 3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.block_tables import GroupLayout, LayerGroups
from stepahead.kernels.cpu.penalties import TokenRuleState
from stepahead.kernels.reference.logprobs import LogprobEntries

BoolArray = NDArray[np.bool_]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt8Array = NDArray[np.uint8]
UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]

LAST_SAMPLE = -1
"""In `StepBatch.token_ids`: feed the token in the row's slot cell."""

NO_POSITION = -1
"""In a cell: nothing to feed (never sampled, released, or a hole)."""

NO_LOGPROBS = -1
"""In place of a number of best ids: no log probabilities are asked for."""

ProgressCallback = Callable[[str, int, int], None]
"""Called as (what, done, total) while weights load; units are bytes."""


class SampleStatus(IntEnum):
    """Outcome of one sampling row; the values are RowError codes of the protocol."""

    OK = 0
    NON_FINITE = 1
    POSITION_MISMATCH = 2
    NOTHING_ALLOWED = 3
    GATE_MISSING = 4
    SKIPPED = 255
    """A SKIP gate: nothing sampled, no error."""


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Which sampling rows of a step want log probabilities of what they sample."""

    top_k: Int32Array  # [num_samples], best ids beside the sampled one; NO_LOGPROBS: the row asks for nothing
    processed: BoolArray  # [num_samples], of the distribution drawn from instead of the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """Sampling parameters of the sampling rows of a step, all of length num_samples.

    A draw is a pure function of (seed, choice_index, output_index); see `stepahead.kernels.reference.philox`.
    """

    temperature: Float32Array  # [num_samples], 0 is greedy
    top_p: Float32Array  # [num_samples], 1 is off
    top_k: Int32Array  # [num_samples], 0 is off
    min_p: Float32Array  # [num_samples], 0 is off
    seed: UInt64Array  # [num_samples]
    choice_index: Int64Array  # [num_samples]
    output_index: Int64Array  # [num_samples], 0 for the first output token
    suppressed: tuple[Int64Array | None, ...] = ()
    """Per sampling row, token ids that may not be sampled at this output index; empty: none for all rows."""
    masks: tuple[UInt8Array | None, ...] = ()
    """Per sampling row, a packed little-endian bit mask of ceil(vocab / 8) bytes; empty: no constrained row."""
    rule_states: tuple[TokenRuleState | None, ...] = ()
    """Per sampling row, the rules that look at its history; empty: no row has such. Once the batch is handed over,
    the device thread alone reads and writes them."""
    logprobs: AskedLogprobs | None = None
    """None: no row asks."""

    def __len__(self) -> int:
        return len(self.temperature)


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """A row whose prompt wants log probabilities: how likely is each target after the tokens before it?"""

    row: int  # of the batch
    top_k: int  # best ids beside the target
    token_ids: Int64Array  # [num_entries], 1 and up: entry i is answered by the logits of the row's i-th fed token


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step as flat host arrays. Rows keep plan order: explicit rows first, then decode members."""

    step_id: int
    slots: Int32Array  # [num_rows]
    token_ids: Int64Array  # [num_tokens], LAST_SAMPLE where the row feeds its cell
    positions: Int64Array  # [num_tokens]
    query_start_loc: Int32Array  # [num_rows + 1], token offsets of the rows
    seq_lens: Int32Array  # [num_rows], last fed position + 1
    block_tables: Int32Array
    """[num_rows, width], of KV group 0. Entries past a row's need are 0 and must not be read; where the group has a
    window, those before the window of the row's first position are NULL_BLOCK."""
    slot_mapping: Int64Array  # [num_tokens], block_id * block_size + offset: where the KV goes; NO_SLOT: nowhere
    sample_rows: Int32Array  # [num_samples], indexes of the rows that sample, ascending
    sampling: SamplingColumns
    invalidated_slots: Int32Array  # slots released or admitted by this plan: their cells become NO_POSITION first
    copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block), before the forward."""
    zeroed_blocks: tuple[int, ...] = ()
    """Blocks set to zero, before the forward."""
    prompt_targets: tuple[PromptTargets, ...] = ()
    """Ascending by row. Never of rows that feed LAST_SAMPLE inside the prompt: there are none."""
    more_groups: tuple[GroupLayout, ...] = ()
    """Of the KV groups 1 and up; `block_tables`, `slot_mapping` and `floors` are group 0's."""
    floors: Int32Array | None = None
    """[num_rows], see `StepLayout.floors`: where rows of a replay begin to see. None: no row is one."""

    @property
    def num_tokens(self) -> int:
        """Tokens fed by the step."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTrace:
    """What a teaching model did in one row of a step."""

    row: int  # of the batch
    num_additions: int
    inputs: tuple[int, ...]
    """The values in the cache that a next token follows from after this row, oldest first."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of some rows of a step; entries lie row after row."""

    rows: Int64Array  # [num_rows], of the batch, ascending
    first_positions: Int64Array  # [num_rows], position of each row's first entry
    entry_counts: Int64Array  # [num_rows], 1 and up
    entries: LogprobEntries


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step sampled, on the host. The log probabilities are never written again."""

    token_ids: Int64Array  # [num_samples], undefined where status is not OK
    status: UInt8Array  # [num_samples], SampleStatus
    traces: tuple[RowTrace, ...] = ()
    """Of teaching models only; holes have none."""
    output_logprobs: RowLogprobs | None = None
    """Of the rows that ask and are OK; None: there are none."""
    prompt_logprobs: RowLogprobs | None = None
    """RAW, of `StepBatch.prompt_targets`, holes left out; None: there are none."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A KV group: layers that keep the same positions of a sequence, and their block pool."""

    window: int
    """Positions a query sees, its own included; 0: all before it."""
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Size of the batch and the paged cache a runner must hold."""

    num_slots: int
    num_blocks: int
    """Of KV group 0."""
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    window: int = 0
    """Of KV group 0: positions a query sees, its own included; 0: all before it."""
    more_groups: tuple[CacheGroup, ...] = ()
    """The KV groups 1 and up; each has a window."""
    group_of_layer: tuple[int, ...] = ()
    """[num_layers]; empty: all layers are group 0."""
    replays_windows: bool = False
    """Whether there are KV groups with a window whose states can be computed again alone."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """All KV groups."""
        return (CacheGroup(self.window, self.num_blocks), *self.more_groups)

    @property
    def layer_groups(self) -> LayerGroups | None:
        """For the kernels; None: there is one group."""
        if not self.more_groups:
            return None
        return LayerGroups(
            of_layer=self.group_of_layer, more_blocks=tuple(group.num_blocks for group in self.more_groups)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rest of the system must know about a loaded model."""

    name: str
    fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    weight_bytes: int
    """Of all parameters in `dtype`."""
    kv_bytes_per_token: int
    """Of all layers together; every layer takes the same."""
    device: str
    available_bytes: int | None = None
    """Memory left for a cache after loading; None: what this process could still use."""
    tokenizer_bundle: bytes = field(default=b"", repr=False)
    """Zip archive (tokenizer.json, chat_template.jinja, bundle.json) or empty."""
    layer_windows: tuple[int, ...] = ()
    """[num_layers], positions a query of the layer sees, 0: all; empty: every layer sees all."""
    stored_weight_bytes: int | None = None
    """As they lie in memory; None: `weight_bytes`."""
    replays_windows: bool = False
    """Whether steps may have rows of a replay: floors, and slot mappings with NO_SLOT."""


class Runner(Protocol):
    """A model on a device. Every method is called on the device thread, in order, and may block it.

    Life: `load` once, `allocate` once, then per step `forward(batch)` followed by `sample(batch)`; a next
    step's `forward` never starts before the previous `sample` has returned. `reset` empties all cells.
    """

    def load(self, progress: ProgressCallback) -> ModelFacts:
        """Loads the weights. Raises `ModelError` with a message for a person."""
        ...

    def allocate(self, shape: CacheShape) -> None:
        """Allocates cells and KV storage, every byte of it written once."""
        ...

    def reset(self) -> None:
        """Forgets all cells (a new session: nothing of the old one may be read)."""
        ...

    def forward(self, batch: StepBatch) -> None:
        """Invalidates cells, copies blocks, resolves LAST_SAMPLE, writes KV, keeps the logits of `sample_rows`.

        A LAST_SAMPLE row whose cell position differs from the row's position is a hole: it writes nothing and
        `sample` reports POSITION_MISMATCH for it.
        """
        ...

    def sample(self, batch: StepBatch) -> StepSamples:
        """Samples `batch.sample_rows`; writes each OK row's cell (token, last fed position + 1) and rule state."""
        ...


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """A runner of a device that works by itself: calls return when their work is launched.

    They come on one thread. `launch_sample` of a step comes after the results of the step before were taken: rules
    that look at a sequence's newest tokens rely on it.
    """

    def cache_bytes(self, limits: CacheShape, memory_share: float) -> int:
        """Allocates all but the KV cache and runs the largest step; returns what is left for the cache.

        Args:
            limits: of the steps to come; `num_blocks` means nothing yet.
            memory_share: of the device's memory that may be used in all, in (0, 1].
        """
        ...

    def launch_sample(self, batch: StepBatch) -> Callable[[], StepSamples]:
        """Launches `Runner.sample`.

        Returns:
            What gives the results, once, on any one thread, when the device has got there (or waits for it).
        """
        ...


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """When a forward ran, on the monotonic clock in nanoseconds."""

    started_ns: int
    ended_ns: int
    with_sampling: bool
    """Whether the step had been sampled by then, too."""


@runtime_checkable
class PlansAhead(Protocol):
    """A runner that begins a step by itself when the step before has ended, if it was told of it in time."""

    def announce(self, batch: StepBatch, *, gated: bool) -> None:
        """`forward(batch)` is submitted next. On the host thread, whatever the device thread does meanwhile.

        Args:
            batch: the very object that `forward` will get.
            gated: whether its sampling waits for masks.
        """
        ...

    def break_off(self) -> None:
        """`reset` is submitted next: what is announced later must not begin before it. On the host thread."""
        ...

    def last_times(self) -> DeviceTimes | None:
        """Of the newest forward; None: it ran while it was called. On the device thread."""
        ...


@runtime_checkable
class PlaysDevice(Protocol):
    """A runner whose steps only play a device that works by itself: see `CpuStream.put_off_ends`."""

    def tell_ends_by(self, tell_end: Callable[[], object]) -> None:
        """Each later `forward` calls `tell_end` as soon as its device is busy."""
        ...


@runtime_checkable
class LeadsRanks(Protocol):
    """A runner that may have other processes compute a part of each step."""

    def end_ranks(self) -> None:
        """Lets them end, on the device thread. No other call may follow."""
        ...
