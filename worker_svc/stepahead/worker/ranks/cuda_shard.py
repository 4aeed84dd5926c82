"""`CudaShard`: a follower's shard on a GPU."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import torch

from stepahead.worker.model.checkpoint import open_checkpoint
from stepahead.worker.model.cuda_engine import DTYPES, CudaEngine, CudaOptions, choose_dtype, nobody_asked
from stepahead.worker.model.facts import fingerprint
from stepahead.worker.ranks.messages import DeviceWork, HostWork, Launch, MeasureCache, RecordSteps
from stepahead.worker.ranks.start_up import load_together, measure_together

if TYPE_CHECKING:
    from stepahead.kernels.cuda.backend import Backend
    from stepahead.worker.ranks.place import RankPlace
    from stepahead.worker.ranks.rank_group import RankGroup
    from stepahead.worker.runner import CacheShape


class CudaShard:
    """Implements `Shard` with the engine that rank 0 has; it samples nothing, so its slots' cells stay empty.

    Args:
        engine: of this rank.
        group: all ranks.
        stream: holds the device's stream as this thread's own.
    """

    def __init__(self, engine: CudaEngine, group: RankGroup, stream: ExitStack) -> None:
        self._engine = engine
        self._group = group
        self._stream = stream
        self.weight_bytes = engine.weight_bytes

    def allocate(self, shape: CacheShape) -> None:
        """See `Shard.allocate`."""
        with torch.inference_mode():
            self._engine.allocate(shape)

    def perform(self, message: HostWork | DeviceWork) -> None:
        """See `Shard.perform`; returns when everything is launched."""
        engine = self._engine
        match message:
            case Launch(batch):
                with engine.launching():
                    engine.forward(batch, nobody_asked)
            case MeasureCache(limits, memory_share):
                with torch.inference_mode():
                    measure_together(self._group, lambda: engine.cache_bytes(limits, memory_share))
            case _:
                assert isinstance(message, RecordSteps), "all ranks compute on the same kind of device"
                with torch.inference_mode():
                    engine.record()

    def release(self) -> None:
        """See `Shard.release`: recorded sums would keep NCCL from ending."""
        self._engine.forget_graphs()
        self._stream.close()


def load_cuda_shard(
    spec: str, dtype: str, backend: Backend, options: CudaOptions, place: RankPlace, group: RankGroup
) -> CudaShard:
    """Loads this rank's shard while rank 0 loads its own; the calling thread launches everything of it.

    Args:
        spec: of the model, as `registry.make_cuda_runner` takes it.
        dtype: "auto" or a key of `DTYPES`.
        backend: this rank's GPU.
        options: see `CudaOptions`; the same on all ranks.
        place: which rank this is.
        group: all ranks.

    Raises:
        ModelError: one of the ranks cannot load the model.
        RankLost: one of the ranks is gone.
    """
    stream = ExitStack()
    stream.enter_context(backend.create_stream().current())

    def load() -> tuple[CudaShard, str]:
        with closing(open_checkpoint(spec)) as checkpoint, torch.inference_mode():
            chosen = choose_dtype(dtype, checkpoint.config.stored_dtype)
            engine = CudaEngine(
                *(checkpoint.config, checkpoint.weights, DTYPES[chosen], backend, options),
                lambda done, total: None,
                group,
            )
            return CudaShard(engine, group, stream), fingerprint(checkpoint, chosen)

    return load_together(group, place.local_size, load, options.describe())[0]
