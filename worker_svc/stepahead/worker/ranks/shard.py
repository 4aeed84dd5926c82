"""Which part of a model each rank holds (the split of Megatron-LM: Shoeybi et al., 2019).

    q, k, v      rows, by heads       o       columns, by heads        sum over ranks behind o
    gate, up     rows                 down    columns                  sum over ranks behind down
    embedding    rows, by token id    head    rows, by token id        sum behind the one, gather behind the other
    norms, router whole

Where there are fewer KV heads than ranks, neighbouring ranks hold the same one. The vocabulary is padded with rows
of zeros to a multiple of the ranks; heads and inner sizes that do not divide are refused (`split`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone reads

from stepahead.worker.errors import ModelError
from stepahead.worker.model.config import ModelConfig
from stepahead.worker.model.weights import WeightSource

_SUMMED = ("o_proj", "down_proj")
"""Linears whose inputs are split: each rank computes a part of the sum."""


def vocabulary_rows(config: ModelConfig, size: int) -> int:
    """Returns how many rows of the embedding and of the head a rank holds, padding included."""
    return -(-config.vocab_size // size)


@dataclass(frozen=True, slots=True)
class _Span:
    """Part of an axis of `full` entries."""

    full: int
    first: int
    count: int


class ShardSource:
    """Implements `WeightSource` over another one: the tensors as one rank holds them.

    Parts are views of what the source maps, so a rank reads from disk what it keeps. Stored bytes are those of the
    whole tensors: progress is through the files.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, rank: int, size: int) -> None:
        """Takes the whole model's source and configuration, which `split.shard_config` has let through."""
        self._source = source
        self._config = config
        self._rank = rank
        self._size = size

    @property
    def total_bytes(self) -> int:
        """See `WeightSource.total_bytes`."""
        return self._source.total_bytes

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource.shapes`: of the whole tensors."""
        return self._source.shapes

    def read(self, name: str) -> tuple[torch.Tensor, int]:
        """See `WeightSource.read`. Raises `ModelError` too if the whole has not the size the configuration says."""
        tensor, stored_bytes = self._source.read(name)
        linear, kind = name.split(".")[-2:]
        if linear in ("embed_tokens", "lm_head"):
            return self._vocabulary_part(name, tensor), stored_bytes
        if linear in _SUMMED and kind == "bias":  # it belongs into the sum once
            return tensor if self._rank == 0 else torch.zeros_like(tensor), stored_bytes
        span = self._span(linear, is_expert=".experts." in name)
        if span is None:
            return tensor, stored_bytes
        axis = 1 if linear in _SUMMED else 0
        _check_size(name, tensor, axis, span.full)
        return tensor.narrow(axis, span.first, span.count), stored_bytes

    def _span(self, linear: str, *, is_expert: bool) -> _Span | None:
        """Returns this rank's part of a linear's outputs or inputs, None for what every rank holds whole."""
        config = self._config
        match linear:
            case "q_proj" | "o_proj":
                return self._even(config.num_heads * config.head_dim)
            case "k_proj" | "v_proj":
                count = max(config.num_kv_heads // self._size, 1)
                first = self._rank * config.num_kv_heads // self._size
                return _Span(*(heads * config.head_dim for heads in (config.num_kv_heads, first, count)))
            case "gate_proj" | "up_proj" | "down_proj":
                mixture = config.mixture if is_expert else None
                return self._even(config.intermediate_size if mixture is None else mixture.intermediate_size)
            case _:
                return None

    def _even(self, full: int) -> _Span:
        count = full // self._size
        return _Span(full, self._rank * count, count)

    def _vocabulary_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        num_ids, num_rows = self._config.vocab_size, vocabulary_rows(self._config, self._size)
        _check_size(name, tensor, 0, num_ids)
        first = min(self._rank * num_rows, num_ids)
        part = tensor[first : first + num_rows]
        return F.pad(part, (0, 0, 0, num_rows - len(part))) if len(part) < num_rows else part


def _check_size(name: str, tensor: torch.Tensor, axis: int, size: int) -> None:
    if tensor.shape[axis] != size:
        shape = [*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]]
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, the configuration says {shape}")
