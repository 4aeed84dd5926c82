"""`CudaLeader`: rank 0's shard on a GPU, and every step told to the other ranks before it is launched.

    host, rank 0     tell N+1, launch N+1           | tell N+2 ...
    host, rank 1            receive, launch N+1     |
    GPU 0            .. N, sample N | resolve, ids -> all | layers, sums | logits -> sample N+1
    GPU 1            .. N           |        ids <-       | layers, sums | logits ->

Hosts tell each other what hosts know, over gloo. The tokens that a step feeds are known to GPU 0 alone, which
samples: they go from device to device, as the sums do. No host waits for a device. Each rank has one stream and one
thread that launches, which does what rank 0 says in its order, so collectives meet in the same order everywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
from typing_extensions import override

from stepahead.kernels.cuda.inputs import Cells
from stepahead.worker.model.cuda_engine import CudaEngine, FedStep, PromptPiece
from stepahead.worker.ranks.leader import Leader
from stepahead.worker.ranks.messages import Launch, MeasureCache, RecordSteps
from stepahead.worker.ranks.rank_group import RankGroup
from stepahead.worker.ranks.start_up import RankReport, measure_together
from stepahead.worker.runner import CacheShape, SamplingColumns, StepBatch

_INTEGERS = np.zeros(0, np.int64)
_FLOATS = np.zeros(0, np.float32)
_NOTHING_SAMPLED = SamplingColumns(
    temperature=_FLOATS,
    top_p=_FLOATS,
    top_k=np.zeros(0, np.int32),
    min_p=_FLOATS,
    seed=np.zeros(0, np.uint64),
    choice_index=_INTEGERS,
    output_index=_INTEGERS,
)
_NO_SLOTS = np.zeros(0, np.int32)


class CudaLeader(Leader):
    """Does for all ranks what a `CudaEngine` does for one; sizes are those of all ranks together."""

    def __init__(self, shard: CudaEngine, group: RankGroup, reports: tuple[RankReport, ...]) -> None:
        super().__init__(shard, group, reports)
        self._shard = shard

    @property
    def cells(self) -> Cells:
        """See `CudaEngine.cells`: rank 0's, the only ones that are ever written."""
        return self._shard.cells

    def cache_bytes(self, limits: CacheShape, memory_share: float) -> int:
        """See `CudaEngine.cache_bytes`. A block takes as much of every GPU's memory: the smallest rest decides."""
        self._group.send(MeasureCache(limits, memory_share))
        left = measure_together(self._group, lambda: self._shard.cache_bytes(limits, memory_share))
        return self._group.size * min(left)

    def record(self) -> None:
        """See `CudaEngine.record`: every rank records the same steps, sums included, in the same order."""
        self._group.send(RecordSteps())
        self._shard.record()

    def reset(self) -> None:
        """See `CudaEngine.reset`; the other ranks' cells are empty."""
        self._shard.reset()

    def launching(self) -> AbstractContextManager[None]:
        """See `CudaEngine.launching`."""
        return self._shard.launching()

    def forward(self, batch: StepBatch, on_prompt_logits: PromptPiece) -> FedStep:
        """See `CudaEngine.forward`."""
        self._group.send(Launch(replace(batch, sampling=_NOTHING_SAMPLED, invalidated_slots=_NO_SLOTS)))
        return self._shard.forward(batch, on_prompt_logits)

    @override
    def end(self) -> None:
        """See `Leader.end`."""
        self._shard.forget_graphs()
        super().end()
