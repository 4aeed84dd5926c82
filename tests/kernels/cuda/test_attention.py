"""Paged attention on the device's kernels against its definition: shapes, windows, caps, cuts (G7, H7, J3, N3)."""

import numpy as np
import pytest
import torch

from stepahead.kernels.cuda.attention import SPLIT_TOKENS, chunk_tiles
from stepahead.kernels.cuda.errors import KernelArgumentError
from stepahead.kernels.cuda.host.backend import HostBackend
from tests.kernels.cuda.paged import TOLERANCE, Heads, Paged, options_for

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"]
)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
SMALL = Heads(num_heads=6, num_kv_heads=2, head_dim=64)
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 100, 129]


@DTYPES
@pytest.mark.parametrize(
    "changes", [{}, {"window": 1}, {"window": 33}, {"soft_cap": 2.0}, {"window": 64, "soft_cap": 1.5}]
)
def test_decode_follows_the_definition(dtype, changes):
    paged, options = Paged.make(dtype, SMALL, LENGTHS), options_for(SMALL, **changes)
    assert paged.error(paged.decode(HostBackend(), options), options) < TOLERANCE[dtype]


def test_decode_and_chunk_follow_the_reference():
    paged, options = Paged.make(torch.float16, SMALL, [5, 40, 70], counts=[5, 1, 30]), options_for(SMALL)
    wanted = paged.reference_rows(options)
    for result in (paged.decode(HostBackend(), options), paged.chunk(HostBackend(), options)):
        assert np.abs(result.float().numpy() - wanted).max() < TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        (torch.bfloat16, Heads(num_heads=9, num_kv_heads=1, head_dim=80)),  # a group of two unequal tiles
        (torch.bfloat16, Heads(num_heads=2, num_kv_heads=2, head_dim=256)),
        (torch.float32, Heads(num_heads=16, num_kv_heads=2, head_dim=128, block_size=32)),
    ],
)
def test_decode_takes_other_heads(dtype, heads):
    paged, options = Paged.make(dtype, heads, [1, 70, 31]), options_for(heads)
    assert paged.error(paged.decode(HostBackend(), options), options) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [0, SPLIT_TOKENS + 40])
def test_long_contexts_are_split_and_joined(window):
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=64)
    lengths = [SPLIT_TOKENS - 1, SPLIT_TOKENS, SPLIT_TOKENS + 1, 3 * SPLIT_TOKENS + 5]
    paged, options = Paged.make(torch.float32, heads, lengths), options_for(heads, window=window)
    assert paged.error(paged.decode(HostBackend(), options), options) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_n3_what_lies_before_the_window_is_never_read(kind):
    paged, options = Paged.make(torch.bfloat16, SMALL, [150, 90], [9, 1]), options_for(SMALL, window=40)
    wanted = paged.expected(options)
    for row, lowest in enumerate((141, 89)):  # positions below lowest - window + 1 are gone, their blocks too
        first = lowest - options.window + 1
        block = int(paged.block_tables[row, first // SMALL.block_size])
        paged.cache[block, :, :, : first % SMALL.block_size] = torch.nan
        paged.block_tables[row, : first // SMALL.block_size] = 10**6
    result = getattr(paged, kind)(HostBackend(checked=True), options)
    assert np.abs(result.double().numpy() - wanted).max() < TOLERANCE[torch.bfloat16]


def test_j3_a_row_has_the_same_bits_alone_and_beside_longer_rows():
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=64)
    paged, options = Paged.make(torch.float32, heads, [700, 90]), options_for(heads)
    together = paged.decode(HostBackend(), options, max_context=2000)
    for row in range(2):
        alone = Paged(
            heads, paged.cache, paged.block_tables[row : row + 1], paged.seq_lens[row : row + 1],
            paged.queries[row : row + 1], np.array([0, 1], np.int32),
        )  # fmt: skip
        assert torch.equal(alone.decode(HostBackend(), options)[0], together[row])


def test_a_hole_attends_to_nothing_and_gives_zeros():
    paged, options = Paged.make(torch.bfloat16, SMALL, [20, 0, 30]), options_for(SMALL)
    result = paged.decode(HostBackend(), options)
    assert not result[1].any()
    assert paged.error(result, options) < TOLERANCE[torch.bfloat16]


@HALVES
@pytest.mark.parametrize("changes", [{}, {"window": 1}, {"window": 40}, {"soft_cap": 2.0}])
def test_chunk_follows_the_definition(dtype, changes):
    lengths, counts = [1, 70, 17, 130, 64], [1, 70, 3, 45, 1]
    paged, options = Paged.make(dtype, SMALL, lengths, counts), options_for(SMALL, **changes)
    assert paged.error(paged.chunk(HostBackend(), options), options) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "heads",
    [
        Heads(num_heads=4, num_kv_heads=1, head_dim=128),
        Heads(num_heads=7, num_kv_heads=1, head_dim=80, block_size=32),
        Heads(num_heads=1, num_kv_heads=1, head_dim=256),
    ],
)
def test_chunk_takes_other_heads(heads):
    paged, options = Paged.make(torch.bfloat16, heads, [75, 20], [12, 20]), options_for(heads)
    assert paged.error(paged.chunk(HostBackend(), options), options) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [0, 50])
def test_h7_cuts_between_chunks_change_no_bit(window):
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=64)
    paged, options = Paged.make(torch.bfloat16, heads, [150], [150]), options_for(heads, window=window)
    whole = paged.chunk(HostBackend(), options)
    parts = []
    for begin, end in ((0, 1), (1, 64), (64, 90), (90, 150)):
        part = Paged(
            heads, paged.cache, paged.block_tables, torch.tensor([end], dtype=torch.int32),
            paged.queries[begin:end], np.array([0, end - begin], np.int32),
        )  # fmt: skip
        parts.append(part.chunk(HostBackend(), options))
    assert torch.equal(torch.cat(parts), whole)


def test_chunk_tiles_cover_every_packed_query_once():
    tiles = chunk_tiles(np.array([0, 1, 1, 30, 158], np.int32), group=3)
    assert tiles.tolist() == [[0, 0], [2, 0], [2, 64], *([3, 64 * i] for i in range(6))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, c: (q.float(), c), "queries is torch.float32"),
        (lambda q, c: (q.transpose(0, 1), c), "strides"),
        (lambda q, c: (q[:, :3], c), "3 heads over 2 KV heads"),
        (lambda q, c: (q, c.transpose(3, 4)), "cache has strides"),
        (lambda q, c: (q.double(), c.double()), "kernels store"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    heads = Heads()
    paged = Paged.make(torch.bfloat16, heads, [20, 20])
    queries, cache = change(paged.queries, paged.cache)
    wrong = Paged(heads, cache, paged.block_tables, paged.seq_lens, queries, paged.query_start_loc)
    with pytest.raises(KernelArgumentError, match=message):
        wrong.decode(HostBackend(), options_for(heads))


def test_chunks_of_float32_are_refused():
    paged = Paged.make(torch.float32, SMALL, [20])
    with pytest.raises(KernelArgumentError, match="tensor cores"):
        paged.chunk(HostBackend(), options_for(SMALL))
