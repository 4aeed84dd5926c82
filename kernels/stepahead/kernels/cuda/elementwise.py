"""Norms, rotary embedding and gated activations on the device."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from stepahead.kernels.cuda.backend import Backend, Launch
from stepahead.kernels.cuda.checks import VECTOR_BYTES, check_tensor, check_vectors, scalar_name, token_stride
from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.sources import Module

Activation = Literal["silu", "gelu", "gelu_tanh"]

_WARP = 32
_MAX_NORM_THREADS = 512


def scalar_module(source: str, tensor: torch.Tensor) -> Module:
    """Returns the module of a source whose one constant is the storage type."""
    return Module(source, (("SCALAR", scalar_name(tensor, source)),))


def norm_module(x: torch.Tensor, weight: torch.Tensor) -> Module:
    """Returns the module of `rms_norm` for activations and a weight; raises `KernelArgumentError`."""
    if weight.dtype not in (x.dtype, torch.float32):
        message = f"weight is {weight.dtype}, the kernel reads {x.dtype} or {torch.float32}"
        raise KernelArgumentError(message)
    return Module("rms_norm", (("SCALAR", scalar_name(x, "x")), ("WEIGHT", scalar_name(weight, "weight"))))


def _norm_threads(size: int, element_size: int) -> int:
    """Threads for a row, from its size alone: the order of the sum follows from them."""
    pieces = size * element_size // VECTOR_BYTES
    return min(max(-(-pieces // _WARP) * _WARP, _WARP), _MAX_NORM_THREADS)


def rms_norm(backend: Backend, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """See `reference.elementwise.rms_norm`.

    Args:
        backend: where the tensors are.
        x: [num_tokens, ..., size]; tokens may be apart.
        weight: [size], as x or float32.
        eps: added to the mean square.
        out: as x in shape and dtype; may be x.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    size = x.shape[-1]
    module = norm_module(x, weight)
    check_tensor(weight, "weight", weight.dtype, (size,))
    strides = [token_stride(tensor, name, x.dtype, tuple(x.shape)) for tensor, name in ((out, "out"), (x, "x"))]
    check_vectors(weight.view(1, -1), "weight")
    rows_per_token = int(np.prod(x.shape[1:-1]))
    backend.launch(
        Launch(
            module=module,
            kernel="rms_norm",
            grid=(len(x) * rows_per_token, 1, 1),
            num_threads=_norm_threads(size, x.element_size()),
            arguments=(
                *(out, x, weight, np.int64(strides[0]), np.int64(strides[1])),
                *(np.int32(rows_per_token), np.int32(size), np.float32(eps)),
            ),
        )
    )


def add_rms_norm(
    backend: Backend, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds x to the residual in place, and returns the norm of the sum as stored.

    Args:
        backend: where the tensors are.
        residual: [num_tokens, size], contiguous.
        x: as residual.
        weight: [size], as residual or float32.
        eps: added to the mean square.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    size = residual.shape[-1]
    for tensor, name in ((residual, "residual"), (x, "x")):
        check_tensor(tensor, name, residual.dtype, (len(residual), size))
        check_vectors(tensor, name)
    check_tensor(weight, "weight", weight.dtype, (size,))
    check_vectors(weight.view(1, -1), "weight")
    out = backend.allocate(tuple(residual.shape), residual.dtype)
    backend.launch(
        Launch(
            module=norm_module(residual, weight),
            kernel="add_rms_norm",
            grid=(len(residual), 1, 1),
            num_threads=_norm_threads(size, residual.element_size()),
            arguments=(out, residual, x, weight, np.int32(size), np.float32(eps)),
        )
    )
    return out


def rope(
    backend: Backend, heads: torch.Tensor, positions: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Turns heads in place; see `reference.rope.apply_rope`.

    Args:
        backend: where the tensors are.
        heads: [num_tokens, num_heads, head_dim], queries and keys; tokens may be apart.
        positions: [num_tokens] int64.
        tables: cos and sin, each [num_positions, head_dim / 2] float32, from `reference.rope.rope_tables`.

    Raises:
        KernelArgumentError: a tensor is not as said here.
    """
    stride = token_stride(heads, "heads", heads.dtype, (None, None, None))
    num_tokens, num_heads, head_dim = heads.shape
    check_tensor(positions, "positions", torch.int64, (num_tokens,))
    for table, name in zip(tables, ("cos", "sin"), strict=True):
        check_tensor(table, name, torch.float32, (len(tables[0]), head_dim // 2))
    if head_dim // 2 * heads.element_size() % VECTOR_BYTES:
        message = f"half a head of {head_dim} values is not made of {VECTOR_BYTES}-byte pieces"
        raise KernelArgumentError(message)
    backend.launch(
        Launch(
            module=scalar_module("rope", heads),
            kernel="rope",
            grid=(num_tokens, 1, 1),
            num_threads=128,
            arguments=(heads, positions, *tables, np.int64(stride), np.int32(num_heads), np.int32(head_dim)),
        )
    )


def gated_activation(backend: Backend, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Returns activation(gate) * up; for silu see `reference.elementwise.silu_mul`.

    Args:
        backend: where the tensor is.
        gate_up: [num_tokens, 2 * size], the gate first.
        activation: silu, gelu (by erf) or gelu_tanh (its approximation).

    Returns:
        [num_tokens, size].

    Raises:
        KernelArgumentError: the tensor is not as said here.
    """
    check_tensor(gate_up, "gate_up", gate_up.dtype, (None, None))
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    per_piece = VECTOR_BYTES // gate_up.element_size()
    if gate_up.shape[1] % (2 * per_piece):
        message = f"gate_up has {gate_up.shape[1]} columns, not two halves of {VECTOR_BYTES}-byte pieces"
        raise KernelArgumentError(message)
    check_vectors(gate_up, "gate_up")
    out = backend.allocate((num_tokens, size), gate_up.dtype)
    num_pieces = num_tokens * size // per_piece
    backend.launch(
        Launch(
            module=scalar_module("gated_activation", gate_up),
            kernel=f"{activation}_mul",
            grid=(-(-num_pieces // 256), 1, 1),
            num_threads=256,
            arguments=(out, gate_up, np.int32(size), np.int64(num_pieces)),
        )
    )
    return out
