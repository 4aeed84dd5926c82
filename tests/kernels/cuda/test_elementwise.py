"""Norms, rotary embedding, activations and cache writes against their references (F2, H5, N6)."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone reads

from stepahead.kernels.cuda.cache import change_blocks, write_kv
from stepahead.kernels.cuda.elementwise import add_rms_norm, gated_activation, rms_norm, rope
from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.host.backend import HostBackend
from stepahead.kernels.reference import elementwise as reference
from stepahead.kernels.reference.attention import write_kv as reference_write
from stepahead.kernels.reference.rope import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
    apply_rope,
    rope_tables,
)

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"]
)
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative: of one rounding to the storage type, with the arithmetic's own behind it."""


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)).to(dtype)


def assert_close(result, wanted, dtype):
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    error = ((result.double() - wanted).abs() / (wanted.abs() + 1e-2)).max()
    assert error < ROUNDING[dtype]


@DTYPES
@pytest.mark.parametrize("size", [8, 64, 576, 4104])
def test_rms_norm(dtype, size):
    x, weight = normal(3, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    out = torch.empty_like(x)
    rms_norm(HostBackend(), x, weight, 1e-5, out)
    assert_close(out, reference.rms_norm(x.float().numpy(), weight.float().numpy(), 1e-5), dtype)


@DTYPES
def test_rms_norm_of_heads_in_place(dtype):
    qkv, weight = normal(5, 6, 64, dtype=dtype), normal(64, dtype=dtype, seed=1)
    wanted = reference.rms_norm(qkv[:, :4].float().numpy(), weight.float().numpy(), 1e-6)
    untouched = qkv[:, 4:].clone()
    heads = qkv[:, :4]
    rms_norm(HostBackend(), heads, weight, 1e-6, heads)
    assert_close(qkv[:, :4], wanted, dtype)
    assert torch.equal(qkv[:, 4:], untouched)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_a_float32_weight_is_multiplied_before_the_one_rounding(dtype):
    x, weight = normal(3, 576, dtype=dtype), 1 + normal(576, seed=1) / 100
    out = torch.empty_like(x)
    rms_norm(HostBackend(), x, weight, 1e-6, out)
    wanted = F.rms_norm(x.float(), (576,), weight, 1e-6)
    assert_close(out, wanted, dtype)
    rounded = F.rms_norm(x.float(), (576,), weight.to(dtype).float(), 1e-6)
    assert (out.float() - wanted).abs().mean() < (out.float() - rounded).abs().mean()


@DTYPES
def test_add_rms_norm_is_the_sum_and_then_the_norm(dtype):
    residual, x, weight = normal(4, 576, dtype=dtype), normal(4, 576, dtype=dtype, seed=1), normal(576, dtype=dtype)
    total = residual + x
    separate = torch.empty_like(total)
    rms_norm(HostBackend(), total, weight, 1e-5, separate)
    out = add_rms_norm(HostBackend(), residual, x, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(out, separate)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation(dtype, activation):
    gate_up = normal(3, 2 * 200, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, -1)
    wanted = {
        "silu": lambda: reference.silu_mul(gate_up.float().numpy()),
        "gelu": lambda: F.gelu(gate) * up,
        "gelu_tanh": lambda: F.gelu(gate, approximate="tanh") * up,
    }[activation]()
    assert_close(gated_activation(HostBackend(), gate_up, activation), wanted, dtype)


SCALINGS = [
    None,
    LinearScaling(factor=4.0),
    Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=64),
    YarnScaling(factor=4.0, original_context_tokens=64),
    DivisorScaling(divisors=tuple(float(i + 1) for i in range(32))),
]


@DTYPES
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_rope_with_every_scaling(dtype, scaling):
    cos, sin = rope_tables(RopeConfig(head_dim=64, theta=10_000.0, scaling=scaling), 300)
    qkv, positions = normal(4, 6, 64, dtype=dtype), torch.tensor([0, 1, 299, 130])
    wanted = apply_rope(qkv[:, :4].float().numpy(), positions.numpy(), cos, sin)
    values = qkv[:, 4:].clone()
    rope(HostBackend(), qkv[:, :4], positions, (torch.from_numpy(cos), torch.from_numpy(sin)))
    assert_close(qkv[:, :4], wanted, dtype)
    assert torch.equal(qkv[:, 4:], values)


@DTYPES
def test_write_kv_and_holes(dtype):
    cache = normal(5, 2, 3, 4, 16, dtype=dtype)
    wanted = cache.float().numpy()
    qkv = normal(4, 9, 16, dtype=dtype, seed=1)
    mapping = np.array([7, 16, 0], np.int64)
    kept = qkv[[0, 1, 3]].float().numpy()
    reference_write(wanted, kept[:, 3:6], kept[:, 6:], mapping)
    write_kv(HostBackend(), cache, qkv[:, 3:], torch.tensor([7, 16, -1, 0]))
    assert np.array_equal(cache.float().numpy(), wanted)


@pytest.mark.parametrize("copies", [[], [(0, 3), (1, 4)], [(0, 1), (1, 2), (2, 0)]])
def test_f2_all_sources_of_block_copies_are_read_first(copies):
    cache = normal(2, 6, 2, 2, 4, 8, dtype=torch.bfloat16)
    wanted = cache.clone()
    for source, destination in copies:
        wanted[:, destination] = cache[:, source]
    wanted[:, 5] = 0
    change_blocks(HostBackend(), cache, copies, [5])
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize(("copies", "zeroed"), [([(0, 6)], []), ([(0, 1), (2, 1)], []), ([], [-1])])
def test_blocks_that_are_not_there_are_refused(copies, zeroed):
    with pytest.raises(KernelArgumentError, match="do not fit 6 blocks"):
        change_blocks(HostBackend(), normal(1, 6, 2, 1, 4, 8), copies, zeroed)


def test_rows_that_are_not_made_of_16_bytes_are_refused():
    x = normal(2, 6, dtype=torch.bfloat16)
    with pytest.raises(KernelArgumentError, match="16-byte pieces"):
        rms_norm(HostBackend(), x, normal(6, dtype=torch.bfloat16), 1e-5, torch.empty_like(x))
