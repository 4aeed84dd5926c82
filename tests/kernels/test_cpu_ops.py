"""The CPU operations against their NumPy definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stepahead.kernels.block_tables import NO_SLOT, NULL_BLOCK, GroupLayout, LayerGroups
from stepahead.kernels.cpu.attention import CacheSize, PagedAttention
from stepahead.kernels.cpu.ops import CpuOps
from stepahead.kernels.cpu.step_layout import CHUNK_TILE, MAX_PADDED_BLOCKS, cut_buckets
from stepahead.kernels.ops import AttentionShape
from stepahead.kernels.reference.attention import LayerAttention, paged_attention, write_kv
from stepahead.kernels.reference.elementwise import gelu_tanh_mul, rms_norm, silu_mul
from stepahead.kernels.reference.rope import RopeConfig, apply_rope, rope_tables
from tests.kernels.step_model import layout_of

BLOCK_SIZE = 4
HEAD_DIM = 8


def shape_of(num_heads, num_kv_heads, **additions):
    return AttentionShape(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        rope=RopeConfig(head_dim=HEAD_DIM, theta=10_000.0),
        **additions,
    )


class Mirror:
    """The reference cache, kept beside the fast one."""

    def __init__(self, num_heads, num_kv_heads, num_blocks=64, dtype=torch.float32, groups=None, **additions):
        self.shape = shape_of(num_heads, num_kv_heads, **additions)
        self.attention = PagedAttention(self.shape, CacheSize(num_blocks, BLOCK_SIZE, 256, groups), dtype)
        self.dtype = dtype
        self.cache = np.zeros((num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM), np.float32)

    def step(self, rows, block_tables, rng, group=None, **changes):
        """Feeds random rows; returns the fast result and the reference's, tokens in layout order.

        With a `group` layer 1 keeps its tokens there, the reference where `block_tables` says. `changes` of the
        layout are for both.
        """
        layout = replace(layout_of(rows, block_tables, BLOCK_SIZE, padding=0), **changes)
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        qkv = rng.normal(size=(len(layout.positions), heads + 2 * kv_heads, HEAD_DIM)).astype(np.float32)
        prepared = self.attention.prepare(layout if group is None else replace(layout, more_groups=(group,)))
        ordered = torch.from_numpy(qkv[prepared.token_order].reshape(len(qkv), -1)).to(self.dtype)
        fast = np.empty((len(qkv), heads * HEAD_DIM), np.float32)
        fast[prepared.token_order] = self.attention.attend(1, ordered, prepared).float().numpy()

        layer = self.shape.layer(1)
        turned = qkv[:, : heads + kv_heads]
        if layer.rope is not None:
            turned = apply_rope(turned, layout.positions, *rope_tables(layer.rope, 256))
        write_kv(self.cache, turned[:, heads:], qkv[:, heads + kv_heads :], layout.slot_mapping)
        expected = np.empty_like(fast)
        for row, (begin, end) in enumerate(
            zip(layout.query_start_loc[:-1], layout.query_start_loc[1:], strict=True)
        ):
            table, length = layout.block_tables[row], int(layout.seq_lens[row])
            result = paged_attention(
                turned[begin:end, :heads],
                self.cache,
                table,
                length,
                self.shape.scale,
                window=layer.window,
                floor=0 if layout.floors is None else int(layout.floors[row]),
                cap=self.shape.cap,
            )
            expected[begin:end] = result.reshape(end - begin, -1)
        return fast, expected


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_mixed_rows_over_shuffled_blocks(num_heads, num_kv_heads):
    rng = np.random.default_rng(5)
    mirror = Mirror(num_heads, num_kv_heads)
    blocks = rng.permutation(64).reshape(4, 16).tolist()
    fed = [0, 0, 0, 0]
    for counts in ([7, 1, 3, 12], [1, 5, 1, 1], [1, 1, 1, 1], [4, 1, 9, 1], [1, 1, 1, 20]):
        rows = list(zip(fed, counts, strict=True))
        order = rng.permutation(4)
        fast, expected = mirror.step([rows[i] for i in order], [blocks[i] for i in order], rng)
        np.testing.assert_allclose(fast, expected, atol=2e-6)
        fed = [start + count for start, count in rows]


def test_chunk_longer_than_a_tile():
    rng = np.random.default_rng(6)
    mirror = Mirror(2, 1)
    tables = [list(range(63, 3, -1))]
    for rows in ([(0, 5)], [(5, CHUNK_TILE + 77)]):
        fast, expected = mirror.step(rows, tables, rng)
        np.testing.assert_allclose(fast, expected, atol=2e-6)


PLAIN = RopeConfig(head_dim=HEAD_DIM, theta=10_000.0)
OTHER = RopeConfig(head_dim=HEAD_DIM, theta=10.0, rotary_dim=4)
ADDITIONS = {
    "window-1": {"layers": (LayerAttention(rope=PLAIN), LayerAttention(rope=PLAIN, window=1))},
    "window-6": {"layers": (LayerAttention(rope=PLAIN), LayerAttention(rope=PLAIN, window=6))},
    "window-140": {"layers": (LayerAttention(rope=PLAIN), LayerAttention(rope=PLAIN, window=140))},
    "other-rope": {"layers": (LayerAttention(rope=PLAIN), LayerAttention(rope=OTHER, window=9))},
    "no-rope": {"layers": (LayerAttention(rope=PLAIN), LayerAttention(rope=None))},
    "cap": {"cap": 0.5},
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_layers_with_windows_other_turns_and_caps(name):
    rng = np.random.default_rng(5)
    mirror = Mirror(4, 2, num_blocks=140, **ADDITIONS[name])
    blocks = rng.permutation(140).reshape(2, 70).tolist()
    fed = [0, 0]
    for counts in ([7, 1], [CHUNK_TILE + 20, 5], [1, 1], [1, 9], [20, 1]):
        fast, expected = mirror.step(list(zip(fed, counts, strict=True)), blocks, rng)
        np.testing.assert_allclose(fast, expected, atol=3e-6)
        fed = [start + count for start, count in zip(fed, counts, strict=True)]


def test_n3_a_group_keeps_a_window_in_few_blocks_of_its_own():
    """Entries that left the window are null, and what their blocks hold now (NaN here) is not read (rule N3)."""
    rng = np.random.default_rng(9)
    window = 6
    layers = (LayerAttention(rope=PLAIN), LayerAttention(rope=PLAIN, window=window))
    groups = LayerGroups(of_layer=(0, 1), more_blocks=(12,))
    mirror = Mirror(4, 2, num_blocks=64, groups=groups, layers=layers)
    blocks = rng.permutation(64).reshape(2, 32).tolist()
    free, held, fed = list(range(12)), [{}, {}], [0, 0]
    for counts in ([7, 1], [9, 5], *[[1, 1]] * 9, [1, 9], [12, 1], [1, 1]):
        rows = list(zip(fed, counts, strict=True))
        for (start, count), own in zip(rows, held, strict=True):
            needed = range(max(0, start - window + 1) // BLOCK_SIZE, -(-(start + count) // BLOCK_SIZE))
            for index in sorted(own.keys() - set(needed)):
                mirror.attention._caches[1][:, own[index]] = float("nan")
                free.append(own.pop(index))
            own.update({index: free.pop(0) for index in needed if index not in own})
        tables = [[own.get(index, NULL_BLOCK) for index in range(32)] for own in held]
        own_layout = layout_of(rows, tables, BLOCK_SIZE, padding=0)
        group = GroupLayout(own_layout.slot_mapping, own_layout.block_tables)
        fast, expected = mirror.step(rows, blocks, rng, group)
        np.testing.assert_allclose(fast, expected, atol=3e-6)
        fed = [start + count for start, count in rows]


@pytest.mark.parametrize("window", [None, 6, 140])
def test_n6_n7_rows_that_see_from_a_floor_on_and_tokens_that_are_not_kept(window):
    """In front of a floor there is no block; what a token that is not kept would replace stays as it is."""
    rng = np.random.default_rng(11)
    layers = (LayerAttention(rope=PLAIN), LayerAttention(rope=PLAIN, window=window))
    mirror = Mirror(4, 2, num_blocks=140, layers=layers)
    blocks = rng.permutation(140).reshape(2, 70).tolist()
    mirror.step([(0, 60), (0, 9)], blocks, rng)
    before = mirror.cache.copy()
    for start, count in ((40, 1), (40, 7), (41, 18), (59, 1)):
        rows = [(start, count), (9, 1)]
        slots = layout_of(rows, blocks, BLOCK_SIZE).slot_mapping
        slots[:count] = NO_SLOT
        floors = np.array([40, 0], np.int32)
        tables = [[NULL_BLOCK] * 10 + blocks[0][10:], blocks[1]]
        fast, expected = mirror.step(rows, tables, rng, slot_mapping=slots, floors=floors)
        np.testing.assert_allclose(fast, expected, atol=3e-6)
    np.testing.assert_array_equal(mirror.cache[blocks[0]], before[blocks[0]])


@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (None, 0.7), (5, 0.7)])
def test_the_reference_is_attention_with_a_mask(window, cap):
    """paged_attention against torch's own operations, the mask written out position by position."""
    rng = np.random.default_rng(3)
    queries, keys, values = (torch.from_numpy(rng.normal(size=(2, 11, 8))) for _ in range(3))
    cache = np.zeros((3, 2, 2, 4, 8), np.float32)
    rows = [tensor.transpose(0, 1).float().numpy() for tensor in (keys, values)]
    write_kv(cache, rows[0], rows[1], np.arange(11))
    scores = queries @ keys.transpose(1, 2) * 0.3
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    for query in range(11):
        for key in range(11):
            if key > query or (window is not None and query - key >= window):
                scores[:, query, key] = -torch.inf
    expected = (scores.softmax(-1) @ values).transpose(0, 1).numpy()
    asked = queries.transpose(0, 1).float().numpy()[4:]
    result = paged_attention(asked, cache, np.arange(3), 11, 0.3, window=window, cap=cap)
    np.testing.assert_allclose(result, expected[4:], atol=1e-6)


def test_bfloat16_is_near():
    rng = np.random.default_rng(7)
    mirror = Mirror(6, 2, dtype=torch.bfloat16)
    fast, expected = mirror.step([(0, 9), (0, 1)], [[3, 9, 1], [4]], rng)
    assert np.linalg.norm(fast - expected) / np.linalg.norm(expected) < 0.02


def test_j10_stale_nan_of_a_former_owner_stays_out():
    rng = np.random.default_rng(8)
    mirror = Mirror(4, 2)
    mirror.attention._caches[0].fill_(float("nan"))
    mirror.attention._caches[0][:, -1] = 0  # the null block is nobody's: no step can have written to it
    for rows, tables in (([(0, 5), (0, 1)], [[7, 8], [9]]), ([(5, 1), (1, 1)], [[7, 8], [9]])):
        fast, expected = mirror.step(rows, tables, rng)
        np.testing.assert_allclose(fast, expected, atol=2e-6)


def test_copies_read_all_sources_first_then_zeroes_apply():
    attention = Mirror(2, 1, num_blocks=6).attention
    for block in range(6):
        attention._caches[0][:, block] = block + 1
    attention.change_blocks(((0, 1), (1, 2)), (4,))
    assert [float(attention._caches[0][0, block].mean()) for block in range(6)] == [1, 1, 2, 4, 0, 6]


def test_buckets_bound_their_padding():
    counts = np.array([100, 99, 60, 59, 58, 3, 3, 2])
    runs = cut_buckets(counts)
    assert [row for first, end in runs for row in range(first, end)] == list(range(8))
    for first, end in runs:
        assert (counts[first] - counts[first:end]).sum() <= MAX_PADDED_BLOCKS
    assert cut_buckets(np.array([5, 5, 5])) == [(0, 3)]
    assert cut_buckets(np.array([], np.int64)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_and_elementwise(dtype):
    rng = np.random.default_rng(9)
    ops = CpuOps(shape_of(2, 1), dtype)
    x, weight = rng.normal(size=(5, 32)).astype(np.float32), rng.normal(size=(48, 32)).astype(np.float32)
    bias = rng.normal(size=48).astype(np.float32)
    scale = rng.normal(size=32).astype(np.float32)
    gate_up = rng.normal(size=(5, 64)).astype(np.float32)
    tensors = [torch.from_numpy(array).to(dtype) for array in (x, scale, gate_up)]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    for given_bias in (None, bias):
        packed = ops.pack_linear(torch.from_numpy(weight), None if given_bias is None else torch.from_numpy(bias))
        assert packed.out_features == 48
        result = ops.linear(tensors[0], packed).float().numpy()
        expected = x @ weight.T + (0 if given_bias is None else given_bias)
        np.testing.assert_allclose(result, expected, **tolerance)
    result = ops.rms_norm(tensors[0], tensors[1], 1e-5).float().numpy()
    np.testing.assert_allclose(result, rms_norm(x, scale, 1e-5), **tolerance)
    np.testing.assert_allclose(ops.silu_mul(tensors[2]).float().numpy(), silu_mul(gate_up), **tolerance)
    np.testing.assert_allclose(ops.gelu_tanh_mul(tensors[2]).float().numpy(), gelu_tanh_mul(gate_up), **tolerance)


def test_a_norm_weight_of_float32_is_rounded_once():
    """After the product: bfloat16 keeps 8 bits, and 1 + w would have lost most of a small w (Gemma)."""
    ops = CpuOps(shape_of(2, 1), torch.bfloat16)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)).bfloat16()
    weight = torch.from_numpy(np.random.default_rng(2).normal(1.0, 0.1, 32).astype(np.float32))
    exact = rms_norm(x.float().numpy(), weight.numpy(), 1e-6)
    result = ops.rms_norm(x, weight, 1e-6)
    assert result.dtype == torch.bfloat16
    np.testing.assert_array_equal(result.float().numpy(), torch.from_numpy(exact).bfloat16().float().numpy())
    rounded = ops.rms_norm(x, weight.bfloat16(), 1e-6).float().numpy()
    assert np.abs(rounded - exact).mean() > 1.2 * np.abs(result.float().numpy() - exact).mean()
