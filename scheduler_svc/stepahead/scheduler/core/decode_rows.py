"""The decode rows of a step as columns, shared by every step between two changes of the set."""

from __future__ import annotations

from collections.abc import Iterable

from stepahead.scheduler.core.ids import Incarnation, RequestKey
from stepahead.scheduler.core.sequence import Stay


class DecodeRows:
    """Members of the decode set that run, in joining order. Never changed once made: steps in flight hold it."""

    __slots__ = ("constrained", "histories", "incarnations", "keys", "stays", "stop_token_ids")

    def __init__(self, stays: Iterable[Stay]) -> None:
        self.stays = list(stays)
        self.incarnations: list[Incarnation] = [stay.incarnation for stay in self.stays]
        self.keys: list[RequestKey] = [stay.sequence.request.key for stay in self.stays]
        self.histories = [stay.sequence.unflushed_history for stay in self.stays]
        self.constrained = [stay for stay in self.stays if stay.sequence.request.constrained]
        # Most requests share one set; the union is what a step's tokens are tested against at once.
        self.stop_token_ids: frozenset[int] = frozenset().union(
            *{stay.sequence.request.stop_token_ids for stay in self.stays}
        )

    def __len__(self) -> int:
        return len(self.stays)
