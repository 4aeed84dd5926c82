"""`LeaderEngine`: rank 0's shard on the CPU, and every step told to the other ranks before it runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.ops import StepLayout
from stepahead.worker.model.cells import SlotCells
from stepahead.worker.model.sampler import DrawRows
from stepahead.worker.model.step_engine import StepEngine, StepLogits
from stepahead.worker.ranks.leader import Leader
from stepahead.worker.ranks.messages import ChangeBlocks, Forward
from stepahead.worker.ranks.rank_group import RankGroup
from stepahead.worker.ranks.start_up import RankReport


class LeaderEngine(Leader):
    """Implements `StepEngine` for all ranks. Its sizes are those of all ranks together."""

    def __init__(self, shard: StepEngine, group: RankGroup, reports: tuple[RankReport, ...]) -> None:
        super().__init__(shard, group, reports)
        self._shard = shard
        self.name = f"{shard.name} x{group.size}"
        # A block takes as much of every rank's memory, so the smallest rank decides.
        self.available_bytes = group.size * min(report.memory_bytes for report in reports)

    @property
    def draw_rows(self) -> DrawRows | None:
        """See `StepEngine.draw_rows`; logits are whole on rank 0."""
        return self._shard.draw_rows

    def chain(self, cells: SlotCells) -> None:
        """See `StepEngine.chain`: all ranks are told each step."""

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """See `StepEngine.change_blocks`."""
        self._group.send(ChangeBlocks(copies, zeroed))
        self._shard.change_blocks(copies, zeroed)

    def forward(
        self, token_ids: NDArray[np.int64], layout: StepLayout, logit_tokens: NDArray[np.int64]
    ) -> StepLogits:
        """See `StepEngine.forward`."""
        self._group.send(Forward(token_ids, layout, logit_tokens))
        return self._shard.forward(token_ids, layout, logit_tokens)
