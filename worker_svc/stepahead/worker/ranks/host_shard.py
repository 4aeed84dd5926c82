"""`HostShard`: a follower's shard on the CPU."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from stepahead.worker.model.checkpoint import open_checkpoint
from stepahead.worker.model.cpu_runner import DTYPES, choose_dtype
from stepahead.worker.model.facts import fingerprint
from stepahead.worker.model.torch_engine import TorchEngine
from stepahead.worker.ranks.messages import ChangeBlocks, DeviceWork, Forward, HostWork
from stepahead.worker.ranks.start_up import load_together

if TYPE_CHECKING:
    from stepahead.worker.ranks.place import RankPlace
    from stepahead.worker.ranks.rank_group import RankGroup
    from stepahead.worker.runner import CacheShape


class HostShard:
    """Implements `Shard` with torch."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.weight_bytes = engine.weight_bytes

    def allocate(self, shape: CacheShape) -> None:
        """See `Shard.allocate`."""
        self._engine.allocate(shape)

    def perform(self, message: HostWork | DeviceWork) -> None:
        """See `Shard.perform`."""
        if isinstance(message, ChangeBlocks):
            self._engine.change_blocks(message.copies, message.zeroed)
            return
        assert isinstance(message, Forward), "all ranks compute on the same kind of device"
        self._engine.forward(message.token_ids, message.layout, message.logit_tokens)

    def release(self) -> None:
        """See `Shard.release`: nothing here outlives its group."""


def load_host_shard(spec: str, dtype: str, threads: int, place: RankPlace, group: RankGroup) -> HostShard:
    """Loads this rank's shard while rank 0 loads its own.

    Args:
        spec: of the model, as `registry.make_runner` takes it.
        dtype: "auto", "bfloat16" or "float32".
        threads: compute threads of this rank.
        place: which rank this is.
        group: all ranks.

    Raises:
        ModelError: one of the ranks cannot load the model.
        RankLost: one of the ranks is gone.
    """

    def load() -> tuple[HostShard, str]:
        with closing(open_checkpoint(spec)) as checkpoint:
            chosen = choose_dtype(dtype, checkpoint.config.stored_dtype)
            engine = TorchEngine(
                checkpoint.config, checkpoint.weights, DTYPES[chosen], threads, lambda done, total: None, group
            )
            return HostShard(engine), fingerprint(checkpoint, chosen)

    return load_together(group, place.local_size, load)[0]
