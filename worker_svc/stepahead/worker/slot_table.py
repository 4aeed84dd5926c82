"""The worker's persistent batch: per slot, everything a step needs that a plan does not repeat.

Columns are NumPy arrays over all slots, so that a steady decode step gathers instead of looping. The table holds
the state *after* the newest accepted plan: it runs ahead of the device, and needs results only for holes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepahead.kernels.cpu.penalties import TokenRuleState
from stepahead.worker.runner import NO_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepahead.kernels.reference.penalties import TokenRules
    from stepahead.worker.runner import CacheShape, Int64Array

    SlotIndex = NDArray[np.intp]

NO_HOLE = -1
"""In `SlotTable.hole_position`: nothing to feed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How one incarnation is sampled, checked."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    choice_index: int
    suppressed: Int64Array | None
    min_tokens: int
    rules: TokenRules | None  # None: nothing that looks at the history or at lists of ids
    logprobs_top_k: int  # NO_LOGPROBS: none of sampled tokens
    processed_logprobs: bool
    prompt_logprobs_top_k: int  # NO_LOGPROBS: none of prompt positions


@dataclass(frozen=True, slots=True)
class BlockTable:
    """A block table of a newcomer: null entries, then blocks."""

    num_null: int
    block_ids: Sequence[int]

    def __len__(self) -> int:
        return self.num_null + len(self.block_ids)


class GroupTables:
    """The block tables of all slots in one KV group. Null entries are 0: whoever reads them goes by positions."""

    def __init__(self, window: int, num_slots: int, max_blocks: int) -> None:
        self.window = window
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.block_tables = np.zeros((num_slots, max_blocks), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A checked admission. Positions and lengths in tokens."""

    slot: int
    incarnation: int
    token_ids: Int64Array  # [history length]
    num_prompt_tokens: int
    num_settled_tokens: int
    replay_start: int  # first position fed; num_settled_tokens itself where there is no replay
    tables: tuple[BlockTable, ...]  # by KV group
    sampling: SamplingOptions
    constrained: bool


class SlotTable:
    """Columns of all slots, and the decode set.

    Args:
        shape: number of slots, blocks and positions.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        num_slots = shape.num_slots
        self.max_blocks = -(-shape.max_model_len // shape.block_size)
        self.incarnation = np.zeros(num_slots, np.uint64)  # 0: free
        self.next_position = np.zeros(num_slots, np.int64)
        self.history_len = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.replay_start = np.zeros(num_slots, np.int64)  # rows from here ..
        self.replay_end = np.zeros(num_slots, np.int64)  # .. to here write KV groups with a window only
        self.groups = [GroupTables(group.window, num_slots, self.max_blocks) for group in shape.groups]
        self.capacity = np.zeros(num_slots, np.int64)  # positions the tables and max_model_len allow
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.choice_index = np.zeros(num_slots, np.int64)
        self.suppress_until = np.zeros(num_slots, np.int64)  # output index; 0: nothing is suppressed
        self.constrained = np.zeros(num_slots, np.bool_)
        self.has_rules = np.zeros(num_slots, np.bool_)
        self.logprobs_top_k = np.full(num_slots, NO_LOGPROBS, np.int32)
        self.processed_logprobs = np.zeros(num_slots, np.bool_)
        self.prompt_logprobs_top_k = np.full(num_slots, NO_LOGPROBS, np.int32)
        self.last_row_step = np.zeros(num_slots, np.int64)  # newest accepted step that has a row of the slot
        self.hole_position = np.full(num_slots, NO_HOLE, np.int64)
        self.refed_step = np.zeros(num_slots, np.int64)  # step that fed a hole again; older results are stale
        self.history: list[Int64Array | None] = [None] * num_slots
        self.suppressed: list[Int64Array | None] = [None] * num_slots
        self.rule_states: list[TokenRuleState | None] = [None] * num_slots  # contents: the device thread's
        self.members: SlotIndex = np.zeros(0, np.intp)  # the decode set, by joining order; never changed in place
        self._invalidated: list[int] = []

    def release(self, slot: int) -> None:
        """Frees a slot; its cell is invalidated by the next step that has rows."""
        self.incarnation[slot] = 0
        self.history[slot] = None
        self.suppressed[slot] = None
        self.rule_states[slot] = None
        self._invalidated.append(slot)

    def append_blocks(self, slot: int, group: int, block_ids: Sequence[int]) -> None:
        """Grows a block table."""
        tables = self.groups[group]
        start = int(tables.num_blocks[slot])
        tables.block_tables[slot, start : start + len(block_ids)] = block_ids
        tables.num_blocks[slot] = start + len(block_ids)
        self._set_capacity(slot)

    def admit(self, admission: Admission) -> None:
        """Puts a sequence into a free slot."""
        slot = admission.slot
        self.incarnation[slot] = admission.incarnation
        self.history[slot] = admission.token_ids
        self.history_len[slot] = len(admission.token_ids)
        self.num_prompt[slot] = admission.num_prompt_tokens
        self.next_position[slot] = self.replay_start[slot] = admission.replay_start
        self.replay_end[slot] = admission.num_settled_tokens
        for tables, table in zip(self.groups, admission.tables, strict=True):
            tables.block_tables[slot] = 0
            tables.block_tables[slot, table.num_null : len(table)] = table.block_ids
            tables.num_blocks[slot] = len(table)
        self._set_capacity(slot)
        self.constrained[slot] = admission.constrained
        self._set_sampling(admission)
        self.hole_position[slot] = NO_HOLE
        self.refed_step[slot] = 0
        self._invalidated.append(slot)

    def take_invalidated(self) -> list[int]:
        """Slots released or admitted since the last call, each once, in order."""
        invalidated = list(dict.fromkeys(self._invalidated))
        self._invalidated.clear()
        return invalidated

    def note_unsampled(self, *, slot: int, incarnation: int, step_id: int, position: int) -> None:
        """Remembers a hole: the position a later row may feed again, the one exception to "fed once".

        Args:
            slot: of the row that should have sampled.
            incarnation: of the row; an older one is ignored.
            step_id: of the row; one that ran before the hole was fed again is ignored.
            position: what would have to be fed again.
        """
        stale = int(self.incarnation[slot]) != incarnation or step_id < int(self.refed_step[slot])
        if not stale and self.hole_position[slot] == NO_HOLE:
            self.hole_position[slot] = position

    def _set_sampling(self, admission: Admission) -> None:
        slot, options = admission.slot, admission.sampling
        self.temperature[slot] = options.temperature
        self.top_p[slot] = options.top_p
        self.top_k[slot] = options.top_k
        self.min_p[slot] = options.min_p
        self.seed[slot] = options.seed
        self.choice_index[slot] = options.choice_index
        self.suppressed[slot] = options.suppressed
        self.suppress_until[slot] = 0 if options.suppressed is None else options.min_tokens
        self.logprobs_top_k[slot] = options.logprobs_top_k
        self.processed_logprobs[slot] = options.processed_logprobs
        self.prompt_logprobs_top_k[slot] = options.prompt_logprobs_top_k
        rules = options.rules
        self.has_rules[slot] = rules is not None
        # The history decides the state, so a replay on any worker continues with the same one.
        self.rule_states[slot] = (
            None if rules is None else TokenRuleState(rules, admission.token_ids, admission.num_prompt_tokens)
        )

    def _set_capacity(self, slot: int) -> None:
        num_blocks = min(int(tables.num_blocks[slot]) for tables in self.groups)
        self.capacity[slot] = min(num_blocks * self.shape.block_size, self.shape.max_model_len)
