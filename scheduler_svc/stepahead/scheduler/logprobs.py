"""Log probabilities between the workers' records and the clients' columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepahead.scheduler.core import TokenLogprobs
from stepahead.v1 import generation_pb2

MAX_PROMPT_CHUNK_BYTES = 2**20
_ENTRY_BYTES = 12
_BEST_BYTES = 9
"""Upper bounds on the wire."""


def to_columns(records: Sequence[TokenLogprobs]) -> generation_pb2.LogprobColumns:
    """The records' entries one after another."""
    columns = generation_pb2.LogprobColumns()
    for record in records:
        columns.token_logprobs.extend(record.token_logprobs)
        columns.ranks.extend(record.ranks)
        columns.top_counts.extend(record.top_counts)
        columns.top_token_ids.extend(record.top_token_ids)
        columns.top_logprobs.extend(record.top_logprobs)
    return columns


class PromptLogprobLog:
    """Of one prompt, position 1 and up. Belongs to the request: a preempted one gives positions again (rule J8)."""

    def __init__(self) -> None:
        self.records: list[TokenLogprobs] = []
        self._next_position = 1

    def add(self, record: TokenLogprobs) -> None:
        """Takes the entries that are new.

        Raises:
            ValueError: positions are missing before them.
        """
        num_known = self._next_position - record.first_position
        if num_known < 0:
            raise ValueError(f"log probabilities begin at {record.first_position}, not {self._next_position}")
        if num_known >= len(record.token_logprobs):
            return
        self.records.append(record if not num_known else _without(record, num_known))
        self._next_position = record.first_position + len(record.token_logprobs)

    def events(self, first_record: int) -> Iterator[generation_pb2.GenerationEvent]:
        """The records from one on, in messages of bounded size."""
        for record in self.records[first_record:]:
            for piece in _pieces(record):
                yield generation_pb2.GenerationEvent(
                    prompt_logprobs=generation_pb2.PromptLogprobs(
                        first_position=piece.first_position, logprobs=to_columns((piece,))
                    )
                )


def _pieces(record: TokenLogprobs) -> Iterator[TokenLogprobs]:
    start, size = 0, 0
    for index, count in enumerate(record.top_counts):
        entry = _ENTRY_BYTES + count * _BEST_BYTES
        if size + entry > MAX_PROMPT_CHUNK_BYTES:
            yield _entries(record, start, index)
            start, size = index, 0
        size += entry
    yield _entries(record, start, len(record.top_counts))


def _without(record: TokenLogprobs, num_entries: int) -> TokenLogprobs:
    return _entries(record, num_entries, len(record.top_counts))


def _entries(record: TokenLogprobs, start: int, end: int) -> TokenLogprobs:
    best = sum(record.top_counts[:start])
    best_end = best + sum(record.top_counts[start:end])
    return TokenLogprobs(
        first_position=record.first_position + start,
        token_logprobs=record.token_logprobs[start:end],
        ranks=record.ranks[start:end],
        top_counts=record.top_counts[start:end],
        top_token_ids=record.top_token_ids[best:best_end],
        top_logprobs=record.top_logprobs[best:best_end],
    )
