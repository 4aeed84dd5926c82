"""Which rank a process is, and where it finds the others.

Either rank 0 starts the others (`followers`), or an orchestrator starts all of them with the variables that
torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Both end in a `RankPlace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepahead.worker.errors import ModelError

LIFELINE = "STEPAHEAD_RANK_LIFELINE"
"""Variable that tells a rank started by rank 0 the descriptor of a pipe which ends when rank 0 does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank among those of its worker."""

    rank: int
    size: int
    local_size: int
    """Ranks on this machine: they share its cores and its memory."""
    local_rank: int = 0
    """Which of them; its GPU is that many behind the first one."""
    address: str
    port: int
    """Where rank 0, or the orchestrator, has the store in which ranks find each other."""
    listen_fd: int | None = None
    """Of rank 0 if it has opened that port itself."""
    lifeline_fd: int | None = None


def place_from_environment(size: int, environment: Mapping[str, str]) -> RankPlace | None:
    """Returns what an orchestrator, or rank 0, says of this process; None if nobody says anything.

    Args:
        size: ranks of the worker, above 1.
        environment: of the process.

    Raises:
        ModelError: the variables contradict `size` or themselves.
    """
    if "RANK" not in environment:
        return None
    try:
        rank, world_size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        local_rank = int(environment.get("LOCAL_RANK", rank % max(local_size, 1)))
        address = environment["MASTER_ADDR"]
        lifeline = int(environment[LIFELINE]) if LIFELINE in environment else None
    except (KeyError, ValueError) as error:
        message = (
            "RANK is set, so WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be too, the numbers in decimal digits: "
            f"{error}"
        )
        raise ModelError(message) from error
    if world_size != size:
        raise ModelError(f"--tensor-parallel-size is {size}, but WORLD_SIZE is {world_size}: they must be equal")
    if not 0 <= rank < size:
        raise ModelError(f"RANK is {rank}, it must be in 0 .. {size - 1}")
    if local_rank < 0 or local_size < 1:
        raise ModelError(
            f"LOCAL_RANK is {local_rank} and LOCAL_WORLD_SIZE {local_size}: counting starts at 0, and at 1"
        )
    return RankPlace(
        rank=rank,
        size=size,
        local_size=local_size,
        local_rank=local_rank,
        address=address,
        port=port,
        lifeline_fd=lifeline,
    )
