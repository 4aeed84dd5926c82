"""Builds the flat arrays of a step from the slot table, and advances the table past the step's rows.

    explicit rows (chunks)          decode members
    [start .. start+count-1]        one token each, at the slot's next position

A steady decode step is a handful of gathers over the cached decode set; explicit rows cost Python per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepahead.kernels.block_tables import NO_SLOT, NULL_BLOCK, GroupLayout
from stepahead.worker.runner import (
    LAST_SAMPLE,
    NO_LOGPROBS,
    AskedLogprobs,
    PromptTargets,
    SamplingColumns,
    StepBatch,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepahead.kernels.cpu.penalties import TokenRuleState
    from stepahead.worker.plan_check import PlanEdits
    from stepahead.worker.row_check import ExplicitRow
    from stepahead.worker.runner import Int32Array, Int64Array
    from stepahead.worker.slot_table import GroupTables, SlotIndex, SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Who the rows of a step are: what its completion is matched by. Rows keep plan order."""

    slots: Sequence[int]  # [num_rows]
    incarnations: Sequence[int]  # [num_rows]
    sample_rows: Int32Array  # [num_samples], rows that sample
    last_positions: Int64Array  # [num_samples], the position each sampling row feeds last
    constrained: tuple[int, ...]  # indexes into the sampling rows


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Token arrays of some rows."""

    token_ids: Int64Array  # [num_tokens]
    positions: Int64Array  # [num_tokens]
    counts: Int64Array  # [num_rows]


@dataclass(frozen=True, slots=True)
class _Columns:
    """What does not change from step to step for a set of sampling slots."""

    slots: SlotIndex
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    choice_index: Int64Array
    num_prompt: Int64Array
    suppress_until: Int64Array
    suppresses: bool
    rule_states: tuple[TokenRuleState | None, ...]  # empty: no slot has rules
    logprobs: AskedLogprobs | None
    constrained: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _SteadySet:
    """Cached for one decode set: valid while the table's `members` is the same array."""

    members: SlotIndex
    columns: _Columns
    slots: Int32Array
    slot_list: list[int]
    incarnation_list: list[int]
    no_token_ids: Int64Array  # all LAST_SAMPLE
    ones: Int64Array
    query_start_loc: Int32Array
    sample_rows: Int32Array


class BatchBuilder:
    """Builds `StepBatch` values; arrays handed out are never written again.

    Args:
        table: the slots; the builder advances next positions.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._steady: _SteadySet | None = None

    def build(self, step_id: int, edits: PlanEdits) -> tuple[StepBatch, StepRows]:
        """The step's arrays. `edits` must have been applied and must have rows."""
        table = self._table
        running = edits.running
        steady = self._steady_set(running) if running is table.members and len(running) else None
        if steady is not None and not edits.rows:
            slots, sample_rows, columns = running, steady.sample_rows, steady.columns
            tokens = self._decode_tokens(running, steady.no_token_ids, steady.ones)
            last_positions, query_start_loc = tokens.positions, steady.query_start_loc
            rows_of = (steady.slots, steady.slot_list, steady.incarnation_list)
        else:
            slots = np.concatenate([np.array([row.slot for row in edits.rows], np.intp), running])
            tokens = self._mixed_tokens(edits.rows, running)
            query_start_loc = np.zeros(len(slots) + 1, np.int32)
            np.cumsum(tokens.counts, out=query_start_loc[1:])
            samples = np.ones(len(slots), np.bool_)
            samples[: len(edits.rows)] = [row.samples for row in edits.rows]
            sample_rows = np.flatnonzero(samples).astype(np.int32)
            last_positions = tokens.positions[query_start_loc[sample_rows + 1] - 1]
            columns = self._gather(slots[sample_rows])
            rows_of = (slots.astype(np.int32), slots.tolist(), table.incarnation[slots].tolist())
        ends = tokens.positions[query_start_loc[1:] - 1] + 1
        starts = tokens.positions[query_start_loc[:-1]]
        replays = self._replays(edits.rows, len(slots))
        groups = [
            self._group_layout(group, slots, tokens, starts, int(ends.max()), replays) for group in table.groups
        ]
        rows = StepRows(
            slots=rows_of[1],
            incarnations=rows_of[2],
            sample_rows=sample_rows,
            last_positions=last_positions,
            constrained=columns.constrained,
        )
        batch = StepBatch(
            step_id=step_id,
            slots=rows_of[0],
            token_ids=tokens.token_ids,
            positions=tokens.positions,
            query_start_loc=query_start_loc,
            seq_lens=ends.astype(np.int32),
            block_tables=groups[0].block_tables,
            slot_mapping=groups[0].slot_mapping,
            sample_rows=sample_rows,
            sampling=self._sampling(columns, last_positions),
            invalidated_slots=np.array(table.take_invalidated(), np.int32),
            copies=edits.copies,
            zeroed_blocks=edits.zeroed_blocks,
            prompt_targets=self._prompt_targets(edits.rows),
            more_groups=tuple(groups[1:]),
            floors=groups[0].floors,
        )
        table.next_position[slots] = ends
        table.last_row_step[slots] = step_id
        return batch, rows

    def _steady_set(self, members: SlotIndex) -> _SteadySet:
        steady = self._steady
        if steady is None or steady.members is not members:
            count = len(members)
            steady = _SteadySet(
                members=members,
                columns=self._gather(members),
                slots=members.astype(np.int32),
                slot_list=members.tolist(),
                incarnation_list=self._table.incarnation[members].tolist(),
                no_token_ids=np.full(count, LAST_SAMPLE, np.int64),
                ones=np.ones(count, np.int64),
                query_start_loc=np.arange(count + 1, dtype=np.int32),
                sample_rows=np.arange(count, dtype=np.int32),
            )
            self._steady = steady
        return steady

    def _gather(self, slots: SlotIndex) -> _Columns:
        table = self._table
        suppress_until = table.suppress_until[slots]
        rule_states: tuple[TokenRuleState | None, ...] = ()
        if table.has_rules[slots].any():
            slot_list: list[int] = slots.tolist()
            rule_states = tuple(table.rule_states[slot] for slot in slot_list)
        top_k = table.logprobs_top_k[slots]
        asks = bool((top_k != NO_LOGPROBS).any())
        return _Columns(
            slots=slots,
            temperature=table.temperature[slots],
            top_p=table.top_p[slots],
            top_k=table.top_k[slots],
            min_p=table.min_p[slots],
            seed=table.seed[slots],
            choice_index=table.choice_index[slots],
            num_prompt=table.num_prompt[slots],
            suppress_until=suppress_until,
            suppresses=bool(suppress_until.any()),
            rule_states=rule_states,
            logprobs=AskedLogprobs(top_k, table.processed_logprobs[slots]) if asks else None,
            constrained=tuple(np.flatnonzero(table.constrained[slots]).tolist()),
        )

    def _decode_tokens(self, slots: SlotIndex, no_token_ids: Int64Array, ones: Int64Array) -> _Tokens:
        """One token per slot: the last sample, or the history where the slot is still inside it."""
        table = self._table
        positions = table.next_position[slots]
        from_history = positions < table.history_len[slots]
        if from_history.any():
            token_ids = no_token_ids.copy()
            for index in np.flatnonzero(from_history).tolist():
                token_ids[index] = self._history_of(int(slots[index]))[positions[index]]
            return _Tokens(token_ids, positions, ones)
        return _Tokens(no_token_ids, positions, ones)

    def _mixed_tokens(self, rows: list[ExplicitRow], running: SlotIndex) -> _Tokens:
        token_parts: list[Int64Array] = []
        position_parts: list[Int64Array] = []
        for row in rows:
            end = row.start + row.count
            history = self._history_of(row.slot)
            known = history[row.start : end]
            token_parts.append(known if end <= len(history) else np.full(1, LAST_SAMPLE, np.int64))
            position_parts.append(np.arange(row.start, end, dtype=np.int64))
        ones = np.ones(len(running), np.int64)
        decode = self._decode_tokens(running, np.full(len(running), LAST_SAMPLE, np.int64), ones)
        counts = np.array([row.count for row in rows], np.int64)
        return _Tokens(
            np.concatenate([*token_parts, decode.token_ids]),
            np.concatenate([*position_parts, decode.positions]),
            np.concatenate([counts, decode.counts]),
        )

    def _prompt_targets(self, rows: list[ExplicitRow]) -> tuple[PromptTargets, ...]:
        """What rows that feed prompt positions are asked about; position 0 follows from nothing."""
        table = self._table
        targets: list[PromptTargets] = []
        for index, row in enumerate(rows):
            top_k = int(table.prompt_logprobs_top_k[row.slot])
            end = min(row.start + row.count + 1, int(table.num_prompt[row.slot]))
            if top_k != NO_LOGPROBS and end > row.start + 1:
                token_ids = self._history_of(row.slot)[row.start + 1 : end]
                targets.append(PromptTargets(index, top_k, token_ids))
        return tuple(targets)

    def _history_of(self, slot: int) -> Int64Array:
        history = self._table.history[slot]
        if history is None:
            message = f"slot {slot} has a row but holds no sequence"
            raise RuntimeError(message)
        return history

    def _replays(self, rows: list[ExplicitRow], num_rows: int) -> Int32Array | None:
        """[num_rows], where the replays that rows belong to started, -1: the row belongs to none; None: all."""
        table = self._table
        starts = np.full(num_rows, -1, np.int32)
        for index, row in enumerate(rows):
            if row.start < table.replay_end[row.slot]:
                starts[index] = table.replay_start[row.slot]
        return starts if (starts >= 0).any() else None

    def _group_layout(
        self,
        group: GroupTables,
        slots: SlotIndex,
        tokens: _Tokens,
        starts: Int64Array,
        longest: int,
        replays: Int32Array | None,
    ) -> GroupLayout:
        """Where a KV group keeps the tokens, and the block tables of the rows, no wider than the longest needs.

        What lies before the window of a row's first position is null: its block may be somebody else's by now.
        A replay keeps nothing where everything is seen (rule N6: what is there is shared, and exact), and where a
        window is, sees nothing before its start (rule N7).
        """
        size = self._table.shape.block_size
        owners = slots if len(slots) == len(tokens.positions) else np.repeat(slots, tokens.counts)
        blocks, offsets = np.divmod(tokens.positions, size)
        slot_mapping = group.block_tables[owners, blocks].astype(np.int64) * size + offsets
        width = -(-longest // size)
        tables: Int32Array = group.block_tables[:, :width].take(slots, axis=0)
        if not group.window:
            if replays is not None:
                slot_mapping[np.repeat(replays >= 0, tokens.counts)] = NO_SLOT
            return GroupLayout(slot_mapping, tables)
        floors = None if replays is None else np.maximum(replays, 0)
        num_null = np.maximum(starts - group.window + 1, 0 if floors is None else floors) // size
        tables[np.arange(width) < num_null[:, None]] = NULL_BLOCK
        return GroupLayout(slot_mapping, tables, floors)

    def _sampling(self, columns: _Columns, last_positions: Int64Array) -> SamplingColumns:
        output_index = last_positions + 1 - columns.num_prompt
        suppressed: tuple[Int64Array | None, ...] = ()
        if columns.suppresses:
            active = output_index < columns.suppress_until
            if active.any():
                slots: list[int] = columns.slots.tolist()
                ids_of = self._table.suppressed
                suppressed = tuple(ids_of[slot] if on else None for slot, on in zip(slots, active, strict=True))
        return SamplingColumns(
            temperature=columns.temperature,
            top_p=columns.top_p,
            top_k=columns.top_k,
            min_p=columns.min_p,
            seed=columns.seed,
            choice_index=columns.choice_index,
            output_index=output_index,
            suppressed=suppressed,
            rule_states=columns.rule_states,
            logprobs=columns.logprobs,
        )
