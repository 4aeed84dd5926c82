"""`TorchEngine`: the decoder in plain torch. The reference, and what runs where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from stepahead.kernels.cpu.ops import CpuOps
from stepahead.kernels.ops import StepLayout
from stepahead.worker.model.cells import SlotCells
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.decoder import Decoder, WeightLoader, attention_shape
from stepahead.worker.model.memory import (
    CACHE_REMEDY,
    cache_bytes_of,
    refused_without_memory,
    weight_bytes_of,
    weight_remedy,
)
from stepahead.worker.model.step_engine import StepLogits
from stepahead.worker.model.weights import WeightSource
from stepahead.worker.ranks.communicator import ALONE, Communicator
from stepahead.worker.ranks.shard import ShardSource
from stepahead.worker.ranks.split import shard_config
from stepahead.worker.runner import CacheShape


class TorchEngine:
    """Implements `StepEngine`. Sets torch's thread count for this process."""

    name = "torch"

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        num_threads: int,
        progress: Callable[[int, int], None],
        ranks: Communicator = ALONE,
    ) -> None:
        """Loads the weights, with several ranks this rank's shard of them.

        Raises:
            ModelError: see `WeightLoader.load` and `shard_config`; or memory does not suffice.
        """
        torch.set_num_threads(num_threads)
        if ranks.size > 1:
            source = ShardSource(source, config, ranks.rank, ranks.size)
            config = shard_config(config, ranks.size)
        needed_bytes = weight_bytes_of(source, dtype)
        with torch.inference_mode(), refused_without_memory("the model", needed_bytes, weight_remedy(dtype)):
            self.ops = CpuOps(attention_shape(config), dtype)
            loader = WeightLoader(config, source, self.ops, progress, ranks.size)
            self._decoder = Decoder(config, loader.load(), self.ops, ranks)
        self._num_layers = config.num_layers
        self.weight_bytes = self.stored_bytes = loader.weight_bytes
        self.kv_bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize

    @property
    def draw_rows(self) -> None:
        """See `StepEngine.draw_rows`."""
        return None

    def allocate(self, shape: CacheShape) -> None:
        """See `StepEngine.allocate`."""
        needed_bytes = cache_bytes_of(shape, self.kv_bytes_per_token, self._num_layers)
        with torch.inference_mode(), refused_without_memory("the KV cache", needed_bytes, CACHE_REMEDY):
            self.ops.allocate_cache(shape.num_blocks, shape.block_size, shape.max_model_len, shape.layer_groups)

    def chain(self, cells: SlotCells) -> None:
        """See `StepEngine.chain`: it has none."""

    def change_blocks(self, copies: tuple[tuple[int, int], ...], zeroed: tuple[int, ...]) -> None:
        """See `StepEngine.change_blocks`."""
        with torch.inference_mode():
            self.ops.change_blocks(copies, zeroed)

    def forward(
        self, token_ids: NDArray[np.int64], layout: StepLayout, logit_tokens: NDArray[np.int64]
    ) -> StepLogits:
        """See `StepEngine.forward`."""
        with torch.inference_mode():
            logits: NDArray[np.float32] = self._decoder.forward(token_ids, layout, logit_tokens).numpy()
        return StepLogits(logits)
