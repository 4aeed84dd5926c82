"""Ranks 1 and up: they compute what rank 0 tells them and never speak to a scheduler."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, assert_never

import structlog

from stepahead.worker.model.checkpoint import open_checkpoint
from stepahead.worker.model.cpu_runner import DTYPES, choose_dtype
from stepahead.worker.model.facts import fingerprint
from stepahead.worker.model.torch_engine import TorchEngine
from stepahead.worker.ranks.messages import Allocate, ChangeBlocks, Forward, Stop
from stepahead.worker.ranks.rank_group import RankGroup, connect
from stepahead.worker.ranks.start_up import complete_together, load_together

if TYPE_CHECKING:
    from stepahead.worker.model.step_engine import StepEngine
    from stepahead.worker.ranks.place import RankPlace

log = structlog.stdlib.get_logger()


def run_follower(spec: str, dtype: str, threads: int, place: RankPlace) -> None:
    """Serves as one rank until rank 0 says that the worker ends.

    Args:
        spec: of the model, as `registry.make_runner` takes it.
        dtype: "auto", "bfloat16" or "float32".
        threads: compute threads of this rank.
        place: which rank this is.

    Raises:
        ModelError: the ranks cannot be connected, or one of them cannot load the model.
        RankLost: another rank is gone.
    """
    group = connect(place, "cpu")
    shard = load_shard(spec, dtype, threads, place.local_size, group)
    follow(group, shard)
    group.close()


def load_shard(spec: str, dtype: str, threads: int, local_size: int, group: RankGroup) -> TorchEngine:
    """Loads this rank's shard while rank 0 loads its own.

    Raises:
        ModelError: one of the ranks cannot load the model.
        RankLost: one of the ranks is gone.
    """

    def load() -> tuple[TorchEngine, str]:
        with closing(open_checkpoint(spec)) as checkpoint:
            chosen = choose_dtype(dtype, checkpoint.config.stored_dtype)
            engine = TorchEngine(
                checkpoint.config, checkpoint.weights, DTYPES[chosen], threads, lambda done, total: None, group
            )
            return engine, fingerprint(checkpoint, chosen)

    engine, _ = load_together(group, local_size, load)
    return engine


def follow(group: RankGroup, shard: StepEngine) -> None:
    """Does what rank 0 says until it says Stop. Raises `RankLost`."""
    while True:
        message = group.receive()
        match message:
            case Forward(token_ids, layout, logit_tokens):
                shard.forward(token_ids, layout, logit_tokens)
            case ChangeBlocks(copies, zeroed):
                shard.change_blocks(copies, zeroed)
            case Allocate(shape):
                complete_together(group, lambda shape=shape: shard.allocate(shape))
            case Stop():
                return
            case _:
                assert_never(message)
