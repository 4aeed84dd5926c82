"""What computes a model's steps on the CPU: the seam between `CpuRunner` and its two engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.ops import StepLayout
from stepahead.worker.model.sampler import DrawRows, LargestLogits
from stepahead.worker.runner import CacheShape

if TYPE_CHECKING:
    from stepahead.worker.model.cells import SlotCells
    from stepahead.worker.model.chained_steps import ChainedSteps


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of a step and, from an engine that finds them on the way, their largest."""

    logits: NDArray[np.float32]  # [num_logits, vocab_size]
    largest: LargestLogits | None = None

    def rows(self, chosen: NDArray[np.int64]) -> StepLogits:
        """Returns some rows, in the order given."""
        return StepLogits(self.logits[chosen], None if self.largest is None else self.largest.rows(chosen))


class StepEngine(Protocol):
    """A loaded model and its KV cache."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, padding and packing left out."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes of the matrices as they lie in memory, which a step reads."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes a token takes in the cache, all layers, padding of heads included."""
        ...

    @property
    def draw_rows(self) -> DrawRows | None:
        """Draws many rows at once, if the engine can."""
        ...

    def chain(self, cells: SlotCells) -> ChainedSteps | None:
        """Runs steps announced ahead, after `allocate`; None: this engine has no such thing."""
        ...

    def allocate(self, shape: CacheShape) -> None:
        """Allocates the KV cache, every byte written. Raises `ModelError` if it does not fit."""
        ...

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """Copies blocks (source, destination), then zeroes blocks."""
        ...

    def forward(
        self, token_ids: NDArray[np.int64], layout: StepLayout, logit_tokens: NDArray[np.int64]
    ) -> StepLogits:
        """Feeds the tokens of a step.

        Args:
            token_ids: [num_tokens] int64, all real ids.
            layout: where they go.
            logit_tokens: [num_logits] indexes into token_ids, each once. Their logits are in memory at once: where
                prompts ask for log probabilities, up to max_num_batched_tokens x vocab_size x 4 bytes.

        Returns:
            Logits that are valid until the next call: an engine may write them to the same memory.
        """
        ...
