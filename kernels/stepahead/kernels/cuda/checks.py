"""Checks of arguments before their addresses go to a kernel, which would read anything as what it expects."""

from __future__ import annotations

import torch

from stepahead.kernels.cuda.errors import KernelArgumentError

VECTOR_BYTES = 16
"""Kernels move rows in pieces of this size: addresses and rows are multiples of it."""

SCALAR_NAMES = {torch.float32: "float", torch.float16: "f16", torch.bfloat16: "bf16"}
"""Storage types, and how a module names them."""


def scalar_name(tensor: torch.Tensor, name: str) -> str:
    """Returns the module constant of a tensor's dtype; raises `KernelArgumentError` for one no kernel stores."""
    if tensor.dtype not in SCALAR_NAMES:
        message = f"{name} is {tensor.dtype}, kernels store {', '.join(map(str, SCALAR_NAMES))}"
        raise KernelArgumentError(message)
    return SCALAR_NAMES[tensor.dtype]


def check_tensor(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raises `KernelArgumentError` unless the tensor is contiguous and as said; None is any size."""
    fits = len(tensor.shape) == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        wanted = [size if size is not None else "any" for size in shape]
        message = f"{name} is {tensor.dtype} {list(tensor.shape)}, the kernel reads {dtype} {wanted}"
        raise KernelArgumentError(message)
    if not tensor.is_contiguous():
        message = f"{name} has strides {tensor.stride()}, the kernel reads it as contiguous"
        raise KernelArgumentError(message)


def token_stride(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> int:
    """Checks a tensor whose first axis (tokens) may have gaps between its rows; returns values between tokens."""
    fits = len(tensor.shape) == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        wanted = [size if size is not None else "any" for size in shape]
        message = f"{name} is {tensor.dtype} {list(tensor.shape)}, the kernel reads {dtype} {wanted}"
        raise KernelArgumentError(message)
    if len(tensor) and not tensor[0].is_contiguous():
        message = f"{name} has strides {tensor.stride()}; within a token the kernel reads it as contiguous"
        raise KernelArgumentError(message)
    check_vectors(tensor, name)
    return int(tensor.stride(0)) if len(tensor) else 0


def check_vectors(tensor: torch.Tensor, name: str) -> None:
    """Raises `KernelArgumentError` unless address, token stride and token are multiples of 16 bytes."""
    if not len(tensor):
        return
    size = tensor.element_size()
    extents = (tensor.data_ptr(), tensor.stride(0) * size, tensor[0].numel() * size)
    if any(extent % VECTOR_BYTES for extent in extents):
        message = f"{name} is not made of {VECTOR_BYTES}-byte pieces (address, stride and row bytes: {extents})"
        raise KernelArgumentError(message)
