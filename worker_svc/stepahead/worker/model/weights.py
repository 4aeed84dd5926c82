"""Weights by name, from safetensors files: mapped, never copied whole.

Names are those of Hugging Face checkpoints (`model.layers.0.self_attn.q_proj.weight`), whatever the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from stepahead.worker.errors import ModelError
from stepahead.worker.model.file_sizes import why_not_whole


class WeightSource(Protocol):
    """Tensors of a checkpoint, read one by one."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor."""
        ...

    def read(self, name: str) -> tuple[torch.Tensor, int]:
        """Returns a tensor of a float dtype and its stored bytes.

        Raises:
            ModelError: there is no such tensor, or it cannot be read.
        """
        ...


class SafetensorsSource:
    """The safetensors files of a model directory, sharded or not."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        names = _file_names(directory)
        for file_name in names:
            path = directory / file_name
            try:
                opened = cast("Any", safe_open(str(path), framework="pt", device="cpu")).__enter__()
            except (OSError, SafetensorError) as error:
                fault = why_not_whole(path) or f"{path} cannot be read as safetensors: {error}"
                raise ModelError(fault) from error
            self._files[file_name] = opened
            for name in cast("list[str]", opened.keys()):
                self._file_of[name] = file_name
                self._shapes[name] = tuple(cast("list[int]", opened.get_slice(name).get_shape()))
        self.total_bytes = sum((directory / name).stat().st_size for name in names)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource.shapes`."""
        return self._shapes

    def read(self, name: str) -> tuple[torch.Tensor, int]:
        """See `WeightSource.read`."""
        if name not in self._file_of:
            raise ModelError(f"the checkpoint has no tensor {name}")
        tensor = cast("torch.Tensor", self._files[self._file_of[name]].get_tensor(name))
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name} is {tensor.dtype}; supported are float32, float16 and bfloat16, and GGUF files"
            )
        return tensor, tensor.numel() * tensor.element_size()

    def close(self) -> None:
        """Closes the files."""
        for opened in self._files.values():
            opened.__exit__(None, None, None)
        self._files.clear()


def _file_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = cast("dict[str, str]", json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{index} cannot be read: {error!r}") from error
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise ModelError(f"{index.name} names files that are missing: {', '.join(missing)}")
        return names
    if (directory / "model.safetensors").exists():
        return ["model.safetensors"]
    raise ModelError(
        f"{directory} holds no model.safetensors and no model.safetensors.index.json; supported are safetensors "
        f"directories and GGUF files (pickled .bin and .pth weights are not: they can run code)"
    )
