"""All ranks load, and none serves unless all have loaded the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

import torch

from stepahead.worker.errors import ModelError
from stepahead.worker.host_memory import available_memory_bytes, release_unused_memory
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.ranks import rank_group
from stepahead.worker.ranks.place import RankPlace
from stepahead.worker.ranks.rank_group import RankGroup
from stepahead.worker.ranks.split import shard_config


class _Loaded(Protocol):
    """What holds a rank's weights."""

    @property
    def weight_bytes(self) -> int: ...


_Shard = TypeVar("_Shard", bound=_Loaded)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank says once it has tried to load."""

    error: str
    """For a person; empty: it has loaded."""
    fingerprint: str = ""
    options: str = ""
    weight_bytes: int = 0
    memory_bytes: int = 0
    """This rank's share of what its machine has left."""


def lead(
    place: RankPlace,
    device: torch.device,
    config: ModelConfig,
    load: Callable[[RankGroup], tuple[_Shard, str]],
    *,
    options: str = "",
    ordered_sums: bool = False,
) -> tuple[_Shard, RankGroup, tuple[RankReport, ...]]:
    """Connects rank 0 to the other ranks, and loads its shard while they load theirs.

    Args:
        place: of rank 0.
        device: of rank 0.
        config: of the whole model.
        load: see `load_together`.
        options: see `load_together`.
        ordered_sums: see `RankGroup`.

    Returns:
        The shard, all ranks, and their reports.

    Raises:
        ModelError: the model cannot be shared among so many, they cannot be connected, or see `load_together`.
        RankLost: a rank is gone.
    """
    shard_config(config, place.size)  # refused before anybody waits for anybody
    group = rank_group.connect(place, device, ordered_sums=ordered_sums)
    shard, reports = load_together(group, place.local_size, lambda: load(group), options)
    return shard, group, reports


def load_together(
    group: RankGroup, local_size: int, load: Callable[[], tuple[_Shard, str]], options: str = ""
) -> tuple[_Shard, tuple[RankReport, ...]]:
    """Calls `load` on every rank and compares what came of it.

    Args:
        group: all ranks; each calls this once.
        local_size: ranks that share this machine's memory.
        load: returns this rank's shard and the fingerprint of the whole model.
        options: how this rank computes, for a person; all must say the same.

    Returns:
        The shard, and the reports of all ranks in their order.

    Raises:
        ModelError: some rank could not load, or has another model or other options than rank 0.
        RankLost: a rank is gone.
    """
    try:
        shard, fingerprint = load()
    except ModelError as error:
        group.exchange(json.dumps(asdict(RankReport(str(error)))))
        raise
    release_unused_memory()
    own = RankReport("", fingerprint, options, shard.weight_bytes, available_memory_bytes() // local_size)
    reports = tuple(RankReport(**json.loads(text)) for text in group.exchange(json.dumps(asdict(own))))
    for rank, report in enumerate(reports):
        if report.error:
            raise ModelError(f"rank {rank}: {report.error}")
        if report.fingerprint != reports[0].fingerprint:
            raise ModelError(
                f"rank {rank} has another model than rank 0, or another dtype (fingerprints "
                f"{report.fingerprint[:12]} and {reports[0].fingerprint[:12]}): give every rank the same files"
            )
        if report.options != reports[0].options:
            raise ModelError(
                f"rank {rank} runs with {report.options}, rank 0 with {reports[0].options}: give every rank the "
                f"same options"
            )
    return shard, reports


def complete_together(group: RankGroup, work: Callable[[], None]) -> None:
    """Calls `work` on every rank and returns when all have ended it.

    Raises:
        ModelError: it failed so on some rank.
        RankLost: a rank is gone.
    """
    try:
        work()
    except ModelError as error:
        group.exchange(str(error))
        raise
    for rank, failure in enumerate(group.exchange("")):
        if failure:
            raise ModelError(f"rank {rank}: {failure}")


def measure_together(group: RankGroup, measure: Callable[[], int]) -> tuple[int, ...]:
    """Calls `measure` on every rank; returns what each one found. Raises `RankLost`."""
    return tuple(int(text) for text in group.exchange(str(measure())))
