"""NumPy arrays as torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from numpy.typing import NDArray

as_tensor = cast("Callable[[NDArray[Any]], torch.Tensor]", torch.from_numpy)  # pyright: ignore[reportUnknownMemberType] - torch leaves the argument untyped
"""Returns a tensor that shares the array's memory; the array must be writable."""
