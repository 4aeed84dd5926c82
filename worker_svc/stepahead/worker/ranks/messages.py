"""What rank 0 tells the other ranks, and how it becomes bytes: values of the dataclasses below, arrays and all.

    | length of the header, int64 | header, JSON | the arrays' bytes, one after the other |

The header is the value with each array replaced by its dtype and shape. Nothing in it can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias, cast, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from stepahead.kernels.ops import StepLayout
from stepahead.worker.runner import CacheShape, StepBatch

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocate the cache."""

    shape: CacheShape


@dataclass(frozen=True, slots=True)
class MeasureCache:
    """Run the largest steps and say what is left for a cache; see `CudaEngine.cache_bytes`."""

    limits: CacheShape
    memory_share: float


@dataclass(frozen=True, slots=True)
class RecordSteps:
    """Record the decode steps; see `CudaEngine.record`."""


@dataclass(frozen=True, slots=True)
class ChangeBlocks:
    """Copy, then zero blocks; see `StepEngine.change_blocks`."""

    copies: tuple[tuple[int, int], ...]
    zeroed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """Feed the tokens of a step; see `StepEngine.forward`."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    layout: StepLayout
    logit_tokens: NDArray[np.int64]  # [num_logits]


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch the forward of a step; see `CudaEngine.forward`."""

    batch: StepBatch
    """As rank 0 has it, but what only rank 0 needs (`cuda_leader`)."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker ends."""


HostWork: TypeAlias = ChangeBlocks | Forward
"""What ranks on the CPU are told while they serve."""

DeviceWork: TypeAlias = MeasureCache | RecordSteps | Launch
"""What ranks on GPUs are told."""

Message: TypeAlias = Allocate | HostWork | DeviceWork | Stop


def _dataclasses_in(hint: object) -> Iterator[Any]:
    """Yields a dataclass, those of its fields, and those that a generic type names."""
    if is_dataclass(hint):
        yield hint
    inner = get_type_hints(hint).values() if is_dataclass(hint) else get_args(hint)
    for each in inner:
        yield from _dataclasses_in(each)


_TYPES = {kind.__name__: kind for kind in _dataclasses_in(Message)}
"""Every dataclass that may stand in a message."""


def pack(message: Message) -> bytes:
    """Returns a message's bytes.

    Raises:
        TypeError: it holds something that has no form here.
    """
    arrays: list[NDArray[Any]] = []
    header = json.dumps(_described(message, arrays), separators=(",", ":")).encode()
    length = len(header).to_bytes(_LENGTH_BYTES, "little")
    return b"".join([length, header, *(array.tobytes() for array in arrays)])


def unpack(data: bytes) -> Message:
    """Returns the message that `pack` made these bytes of; its arrays are its own and writable."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES:start])
    return cast("Message", _Restorer(data, start).restored(header))


def _described(value: object, arrays: list[NDArray[Any]]) -> object:
    """Returns a value as JSON can say it, and appends its arrays in order."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        arrays.append(array)
        return {"array": array.dtype.str, "shape": array.shape}
    if isinstance(value, tuple):
        return [_described(item, arrays) for item in cast("tuple[object, ...]", value)]
    name = type(value).__name__
    if is_dataclass(value) and name in _TYPES:
        return {"type": name, "fields": [_described(getattr(value, each.name), arrays) for each in fields(value)]}
    message = f"a {name} cannot stand in a message between ranks"
    raise TypeError(message)


class _Restorer:
    """Reads arrays off the data, in order."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._start = start

    def restored(self, described: object) -> object:
        """Returns the value that was described."""
        if isinstance(described, list):
            return tuple(self.restored(item) for item in cast("list[object]", described))
        if not isinstance(described, dict):
            return described
        parts = cast("dict[str, Any]", described)
        if "array" in parts:
            return self._array(np.dtype(parts["array"]), tuple(parts["shape"]))
        kind = _TYPES[parts["type"]]
        values = [self.restored(each) for each in parts["fields"]]
        return kind(**dict(zip((each.name for each in fields(kind)), values, strict=True)))

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        count = int(np.prod(shape))
        array = np.frombuffer(self._data, dtype, count, self._start).reshape(shape).copy()
        self._start += count * dtype.itemsize
        return array
