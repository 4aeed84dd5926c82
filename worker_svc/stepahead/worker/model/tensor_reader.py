"""Reads a checkpoint's tensors one by one: checks shapes, counts, reports progress."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepahead.worker.errors import ModelError
from stepahead.worker.model.weights import WeightSource


class TensorReader:
    """Reads tensors by name for a loader, whatever it makes of them."""

    def __init__(self, source: WeightSource, progress: Callable[[int, int], None]) -> None:
        """Takes the source and a callback (bytes done, bytes in all)."""
        self._source = source
        self._progress = progress
        self._done_bytes = 0
        self.num_parameters = 0
        """Numbers read so far."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of a float dtype, perhaps a view of a mapped file.

        Raises:
            ModelError: it is missing or has another shape than the configuration says.
        """
        tensor, stored_bytes = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, the configuration says {list(shape)}")
        self._done_bytes += stored_bytes
        self.num_parameters += tensor.numel()
        self._progress(min(self._done_bytes, self._source.total_bytes), self._source.total_bytes)
        return tensor

    def finish(self) -> None:
        """Reports everything as done: files hold more than the tensors that were read."""
        self._progress(self._source.total_bytes, self._source.total_bytes)
