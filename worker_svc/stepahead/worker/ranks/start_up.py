"""All ranks load, and none serves unless all have loaded the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from stepahead.worker.errors import ModelError
from stepahead.worker.host_memory import available_memory_bytes, release_unused_memory
from stepahead.worker.model.step_engine import StepEngine
from stepahead.worker.ranks.rank_group import RankGroup

_Engine = TypeVar("_Engine", bound=StepEngine)


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank says once it has tried to load."""

    error: str
    """For a person; empty: it has loaded."""
    fingerprint: str = ""
    weight_bytes: int = 0
    memory_bytes: int = 0
    """This rank's share of what its machine has left."""


def load_together(
    group: RankGroup, local_size: int, load: Callable[[], tuple[_Engine, str]]
) -> tuple[_Engine, tuple[RankReport, ...]]:
    """Calls `load` on every rank and compares what came of it.

    Args:
        group: all ranks; each calls this once.
        local_size: ranks that share this machine's memory.
        load: returns this rank's shard and the fingerprint of the whole model.

    Returns:
        The shard, and the reports of all ranks in their order.

    Raises:
        ModelError: some rank could not load, or has another model than rank 0.
        RankLost: a rank is gone.
    """
    try:
        engine, fingerprint = load()
    except ModelError as error:
        group.exchange(json.dumps(asdict(RankReport(str(error)))))
        raise
    release_unused_memory()
    own = RankReport("", fingerprint, engine.weight_bytes, available_memory_bytes() // local_size)
    reports = tuple(RankReport(**json.loads(text)) for text in group.exchange(json.dumps(asdict(own))))
    for rank, report in enumerate(reports):
        if report.error:
            raise ModelError(f"rank {rank}: {report.error}")
        if report.fingerprint != reports[0].fingerprint:
            raise ModelError(
                f"rank {rank} has another model than rank 0, or another dtype (fingerprints "
                f"{report.fingerprint[:12]} and {reports[0].fingerprint[:12]}): give every rank the same files"
            )
    return engine, reports


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
